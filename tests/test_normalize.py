"""Normalizing: data-juicer runs for real, in a process of its own; pairs come back as they went, and every
loss is named.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from importlib import metadata

import pytest
import tiny
import yaml
from preloaded import Preloaded
from trl.data_utils import is_conversational

from composer_nb.batch import ComposerDataCollator, DPOPair
from composer_nb.reference_cache import ReferenceCache, cached_reference_logprobs
from composer_nb.replay import normalize as room
from composer_nb.replay.normalize import (
    DEFAULT_RECIPE,
    NEAR_DUPLICATE_RECIPE,
    TOOL_CALL_RECIPE,
    DJNormalizer,
    NormalizedDPOPair,
    NormalizeReport,
    pair_record,
    read_recipe,
    replay_and_normalize_trace,
    replay_and_normalize_trace_sync,
)
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.traces import Action, ToolCall, TraceState, action_text

WIRE = [
    {"role": "user", "content": [{"type": "text", "text": "What do my notes say?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": '{"path": "n"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "Buy milk."},
]


def pair_of(state_id, chosen, rejected="I have no idea at all.", **more):
    return DPOPair(state_id, WIRE, chosen, rejected, **more)


def call_pair(state_id, name, **arguments):
    return pair_of(state_id, action_text(Action(tool_calls=(ToolCall(name, arguments),))))


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """Whoever has run each operator once has imported what it imports late."""
    folder = tmp_path_factory.mktemp("data_juicer")
    steps = [*TOOL_CALL_RECIPE, *NEAR_DUPLICATE_RECIPE, {"clean_email_mapper": {}}]
    records = [pair_record(pair_of("any", "What is it that you asked?"))]
    (folder / "job.json").write_text(json.dumps({"records": records, "steps": steps, "text_key": "chosen"}))
    begins = room._source().replace("sys.argv[1]", repr(str(folder)))
    no_thread = "import sys, tqdm; tqdm.tqdm.monitor_interval = 0\n"
    begins = begins.replace("import sys\n", no_thread, 1)
    place = {"HF_DATASETS_CACHE": f"{folder}/datasets", "TMPDIR": str(folder), "PYTHONSAFEPATH": "1"}
    made = Preloaded(begins, **room._OFFLINE, **place)
    assert (folder / "done.json").exists()
    yield made
    made.close()


@pytest.fixture
def imported(preloaded, monkeypatch):
    """The child is a fork of a process that has imported data-juicer, which takes longer than any
    recipe here.
    """
    monkeypatch.setattr(room, "subprocess", preloaded)


def installed():
    return {(d.metadata["Name"], d.version) for d in metadata.distributions()}


def test_the_originals_recipe():
    assert [next(iter(step.items())) for step in DEFAULT_RECIPE] == [
        ("text_length_filter", {"min_len": 8, "max_len": 32000}),
        ("words_num_filter", {"min_num": 2, "max_num": 4096}),
        ("special_characters_filter", {"max_ratio": 0.5}),
        ("document_deduplicator", {"lowercase": True, "ignore_non_character": True}),
    ]
    assert DJNormalizer().steps == [dict(step) for step in DEFAULT_RECIPE]


def test_default_recipe_at_its_limits_and_the_round_trip():
    odd = {"agreed": ["A"], "nested": {"only here": {"x": None}}, "tuple": (1, 2), "object": {1, 2}}
    pairs = [
        pair_of(
            "eight",
            "ab cdefg",
            n_teachers_agreeing=3,
            rejected_ids=(5, 6, 2),
            chosen_ref_logprob=-1.5,
            rejected_ref_logprob=-2.5,
            provenance=odd,
        ),
        pair_of("seven", "ab cdef"),
        pair_of("long", "xy" * 15999 + " z"),
        pair_of("too long", "xy" * 16000 + " z"),
        pair_of("one word", "supercalifragilistic"),
        pair_of("half", "aa bb 1."),  # blanks and digits count as special: four of eight
        pair_of("over half", "aa bb 1.."),
        pair_of("same", "AB, 17 CDEFG!", provenance={"other keys": True}),
        pair_of("half a surrogate \ud83d", "text with half \ud83d a surrogate"),
        pair_of("eight", "a second pair of the same state"),
    ]
    normalizer = DJNormalizer()
    clean = normalizer.normalize(iter(pairs))
    kept = [pairs[i] for i in (0, 2, 5, 8, 9)]
    assert [p.state_id for p in clean] == [p.state_id for p in kept]
    for before, after in zip(kept, clean):
        assert isinstance(after, NormalizedDPOPair)
        assert all(getattr(after, f.name) == getattr(before, f.name) for f in fields(DPOPair))
        assert after.provenance is before.provenance and after.state_messages is before.state_messages
        assert after.chosen_messages == [{"role": "assistant", "content": before.chosen}]
        assert after.rejected_messages == [{"role": "assistant", "content": before.rejected}]
        assert (
            after.prompt.startswith("user: What do my notes say?")
            and '"path": "n"' in after.prompt
            and "tool: Buy milk." in after.prompt
        )
    report = normalizer.report
    length, words, characters, duplicates = report.operators
    assert length.dropped == (("seven", {"text_len": 7}), ("too long", {"text_len": 32002}))
    assert words.dropped == (("one word", {"num_words": 1}),)
    assert [(state, why["special_char_ratio"]) for state, why in characters.dropped] == [
        ("over half", pytest.approx(5 / 9))
    ]
    assert duplicates.dropped == (("same", {"duplicate_of": "eight"}),)
    assert (report.pairs_in, report.pairs_out, report.edited) == (
        10,
        5,
        (),
    ) and report.version == metadata.version("py-data-juicer")
    assert [row["kept"] for row in report.table()] == [8, 7, 6, 5] and [o.seen for o in report.operators] == [
        10,
        8,
        7,
        6,
    ]


def test_the_caller_is_left_as_it_was(tmp_path, monkeypatch):
    workplace, temporary = tmp_path / "here", tmp_path / "tmp"
    workplace.mkdir(), temporary.mkdir()
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    logger = logging.getLogger()

    def snapshot():
        modules = {name for name in ("data_juicer", "loguru", "ray") if name in sys.modules}
        logs = (logger.level, list(logger.handlers), logging.root.manager.disable)
        return modules, logs, dict(os.environ), multiprocessing.get_start_method(allow_none=True), installed()

    before = snapshot()
    with pytest.raises(RuntimeError, match="simhash.*not installed"):
        DJNormalizer([{"document_simhash_deduplicator": {}}]).normalize(
            [pair_of("a", "one two three"), pair_of("b", "four five six")]
        )
    DJNormalizer().normalize([pair_of("a", "one two three")])
    assert snapshot() == before
    assert (
        not list(workplace.rglob("*")) and not list(temporary.rglob("*")) and not (tmp_path / "hf").exists()
    )


def test_quiet_unless_asked(capfd):
    pairs = [pair_of("a", "one two three")]
    DJNormalizer(TOOL_CALL_RECIPE).normalize(pairs)
    assert capfd.readouterr() == ("", "")
    DJNormalizer(TOOL_CALL_RECIPE, verbose=True).normalize(pairs)
    assert "text_length_filter" in capfd.readouterr().err


@pytest.mark.usefixtures("imported")
def test_edited_texts_let_go_of_what_belonged_to_the_old_ones():
    known = {"rejected_ids": [5, 6], "chosen_ref_logprob": -1.0, "rejected_ref_logprob": -2.0}
    pairs = [pair_of("none", "write to the team", **known),
             pair_of("chosen", "write to a@b.com now", **known),
             pair_of("rejected", "write to them", "mail a@b.com", **known)]  # fmt: skip
    normalizer = DJNormalizer([{"clean_email_mapper": {}}, {"clean_email_mapper": {"text_key": "rejected"}}])
    none, chosen, rejected = normalizer.normalize(pairs)
    assert (none.rejected_ids, none.chosen_ref_logprob, none.rejected_ref_logprob) == ([5, 6], -1.0, -2.0)
    assert "@" not in chosen.chosen and chosen.chosen_messages[0]["content"] == chosen.chosen
    assert (chosen.rejected_ids, chosen.chosen_ref_logprob, chosen.rejected_ref_logprob) == (
        [5, 6],
        None,
        -2.0,
    )
    assert "@" not in rejected.rejected and rejected.rejected_messages[0]["content"] == rejected.rejected
    assert (rejected.rejected_ids, rejected.chosen_ref_logprob, rejected.rejected_ref_logprob) == (
        None,
        -1.0,
        None,
    )
    assert normalizer.report.edited == ("chosen", "rejected")


@pytest.mark.usefixtures("imported")
def test_operators_on_two_fields_each_use_their_own_numbers():
    recipe = [
        step
        for key in ("chosen", "rejected")
        for step in (
            {"text_length_filter": {"min_len": 8, "text_key": key}},
            {"document_deduplicator": {"text_key": key}},
        )
    ]
    pairs = [pair_of("short rejected", "long enough", "no"),
             pair_of("good", "long enough too", "also long enough"),
             pair_of("same rejected", "yet another text", "also long enough")]  # fmt: skip
    normalizer = DJNormalizer(recipe)
    assert [p.state_id for p in normalizer.normalize(pairs)] == ["good"]
    assert [[state for state, _ in o.dropped] for o in normalizer.report.operators] == [
        [],
        [],
        ["short rejected"],
        ["same rejected"],
    ]


@pytest.mark.usefixtures("imported")
def test_nothing_left_and_nothing_given():
    normalizer = DJNormalizer()
    assert normalizer.normalize([pair_of("a", "no"), pair_of("b", "yes")]) == []
    assert [o.seen for o in normalizer.report.operators] == [2, 0, 0, 0] and len(
        normalizer.report.operators[0].dropped
    ) == 2
    assert normalizer.normalize([]) == [] and normalizer.report == NormalizeReport()


@pytest.mark.usefixtures("imported")
def test_tool_calls_need_their_recipe():
    calls = [call_pair("1+2", "add", a=1, b=2), call_pair("3+4", "add", a=3, b=4), call_pair("ls", "ls")]
    twins = [
        replace(calls[0], state_id="again"),
        replace(calls[0], state_id="elsewhere", state_messages=WIRE[:1]),
    ]
    default, own = DJNormalizer(), DJNormalizer(TOOL_CALL_RECIPE)
    assert "3+4" not in [p.state_id for p in default.normalize([*calls, *twins])]
    assert [p.state_id for p in own.normalize([*calls, *twins])] == ["1+2", "3+4", "ls", "elsewhere"]
    assert own.report.operators[-1].dropped == (("again", {"duplicate_of": "1+2"}),)


@pytest.mark.usefixtures("imported")
def test_near_duplicates_but_not_all_short_texts():
    text = "The function reads the file, splits it into lines and returns the longest of {}."
    pairs = [pair_of("first", text.format("them")), pair_of("near", text.format("these")),
             pair_of("short", "buy milk"), pair_of("other short", "go home now")]  # fmt: skip
    normalizer = DJNormalizer(NEAR_DUPLICATE_RECIPE)
    assert [p.state_id for p in normalizer.normalize(pairs)] == ["first", "short", "other short"]
    assert normalizer.report.operators[-1].name == "document_minhash_deduplicator"
    assert len(DJNormalizer().normalize(pairs)) == 4


@pytest.mark.usefixtures("imported")
def test_recipes(tmp_path):
    path = tmp_path / "recipe.yaml"
    content = {
        "text_keys": ["rejected"],
        "process": [{"text_length_filter": {"min_len": 8}}, {"words_num_filter": None}],
    }
    path.write_text(yaml.safe_dump(content))
    assert read_recipe(path) == (
        [{"text_length_filter": {"min_len": 8}}, {"words_num_filter": {}}],
        "rejected",
    )
    path.write_text(
        yaml.safe_dump({"text_keys": "rejected", "process": [{"text_length_filter": {"min_len": 8}}]})
    )
    kept = DJNormalizer(str(path)).normalize(
        [pair_of("a", "no", "long enough"), pair_of("b", "long enough", "no")]
    )
    assert [p.state_id for p in kept] == ["a"]
    path.write_text("dataset_path: x")
    for bad, match in [
        (path, "no `process`"),
        ([], "no operators"),
        (["x"], "got 'x'"),
        ([{"a": {}, "b": {}}], "step"),
        ([{"a": 1}], "step"),
    ]:
        with pytest.raises(ValueError, match=match):
            DJNormalizer(bad)
    with pytest.raises(OSError):
        DJNormalizer(tmp_path / "absent.yaml")


def test_failures_of_the_child_are_named():
    with pytest.raises(RuntimeError, match="no operator 'text_len_filter'"):
        DJNormalizer([{"text_len_filter": {}}]).normalize([pair_of("a", "one two three")])
    with pytest.raises(RuntimeError, match="stopped after 0.05 s"):
        DJNormalizer(timeout_s=0.05).normalize([pair_of("a", "one two three")])


def test_records_hold_what_arrow_keeps():
    record = pair_record(pair_of("a", "x", provenance={"k": {"only": 1}}), 7)
    assert record["number"] == 7 and all(
        isinstance(record[k], str) for k in ("prompt", "chosen", "rejected", "pair", "metadata")
    )
    for side in ("prompt_messages", "chosen_messages", "rejected_messages"):
        assert all(
            set(m) == {"role", "content"} and all(isinstance(v, str) for v in m.values())
            for m in record[side]
        )


def test_without_data_juicer(monkeypatch):
    monkeypatch.setitem(sys.modules, "data_juicer", None)
    with pytest.raises(ImportError, match=r'pip install "composer-notebooks\[normalize\]"'):
        DJNormalizer().normalize([])
    teacher = Scripted("A", Action("x"))
    with pytest.raises(ImportError, match="data_juicer"):
        replay_and_normalize_trace_sync([STATE], [teacher, Scripted("B", Action("x"))], progress=False)
    assert not teacher.asked


def test_importing_the_room_does_not_import_data_juicer():
    code = (
        "import sys, composer_nb.replay.normalize; "
        "print([m for m in ('data_juicer', 'loguru', 'ray', 'aiohttp') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.usefixtures("imported")
def test_pairs_go_on_to_trl_and_to_the_reference(tmp_path):
    tokenizer = tiny.tokenizer()
    messages = [{"role": "user", "content": "What do my notes say?"}]
    (pair,) = DJNormalizer().normalize([DPOPair("a", messages, "Your notes say: buy milk.", "I have none.")])
    row = {
        "prompt": list(pair.state_messages),
        "chosen": pair.chosen_messages,
        "rejected": pair.rejected_messages,
    }
    assert is_conversational(row)
    collator = ComposerDataCollator(tokenizer)
    (scored,) = cached_reference_logprobs(
        tiny.model(), [pair], collator, cache=ReferenceCache(tmp_path), progress=False
    )
    assert isinstance(scored, NormalizedDPOPair) and scored.chosen_ref_logprob < 0 and collator([], [scored])


# From a trace to clean pairs


@dataclass
class Scripted:
    "A teacher that costs nothing and does the same in every state; None is a reply that was skipped."

    name: str
    action: Action | None
    model: str = "scripted"
    asked: list[str] = field(default_factory=list)

    def request(self, state: TraceState) -> TeacherRequest:
        return TeacherRequest(self.name, self.model, tuple(state.messages))

    def worst_case_usd(self, request: TeacherRequest) -> float:
        return 0.0

    async def reply(self, request: TeacherRequest) -> TeacherReply:
        self.asked.append(request.key)
        outcome = {"outcome": "skipped", "reason": "empty"} if self.action is None else {}
        return TeacherReply(request.key, self.name, self.action, **outcome)

    async def aclose(self) -> None:
        pass


STATE = TraceState(
    "s/0",
    [{"role": "user", "content": "What do my notes say?"}],
    Action("I cannot read files."),
    model="acme/one",
)
GOOD = Action("Your notes say: buy milk.")


def pool(*actions):
    return [Scripted(name, action) for name, action in zip("ABCDE", actions)]


@pytest.mark.usefixtures("imported")
def test_trace_to_clean_pairs_in_and_outside_a_loop():
    states = [STATE, replace(STATE, state_id="s/1", messages=[{"role": "user", "content": "Again?"}])]
    normalizer = DJNormalizer()
    outside = replay_and_normalize_trace_sync(
        iter(states), pool(GOOD, GOOD, None), recipe=normalizer, progress=False
    )
    assert [p.state_id for p in outside] == ["s/0"]  # the second chosen is the first one's duplicate
    assert normalizer.report.operators[-1].dropped == (("s/1", {"duplicate_of": "s/0"}),)
    assert outside[0].provenance["agreed"] == ["A", "B"] and outside[0].provenance["abstained"] == ["C"]

    async def inside():
        awaited = await replay_and_normalize_trace([STATE], pool(GOOD, GOOD, None), progress=False)
        return awaited, replay_and_normalize_trace_sync([STATE], pool(GOOD, GOOD, None), progress=False)

    awaited, nested = asyncio.run(inside())
    assert awaited == nested and [replace(p, provenance={}) for p in awaited] == [
        replace(p, provenance={}) for p in outside
    ]
    assert awaited[0].provenance == outside[0].provenance


def test_what_can_fail_for_free_fails_before_anyone_is_asked():
    teachers = pool(GOOD, GOOD)
    for options, error, match in [
        ({"agreement_threshold": 3}, ValueError, "threshold is 3, but only 2"),
        ({"recipe": [{"a": 1}]}, ValueError, "step"),
        ({"dry_run": True}, ValueError, "dry run"),
        ({"min_margin": 0}, ValueError, "min_margin"),
    ]:
        with pytest.raises(error, match=match):
            replay_and_normalize_trace_sync([STATE], teachers, progress=False, **options)
    with pytest.raises(ValueError, match="duplicate state ids"):
        replay_and_normalize_trace_sync([STATE, STATE], teachers, progress=False)
    assert not any(teacher.asked for teacher in teachers)
