"""House rules around families of several turns: a call that breaks one has no effect, and no way
around them is open.
"""

import json
import random

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.batch import ComposerDataCollator, assert_aligned
from composer_nb.tasks.contract import CLAIMS, EpisodeLost, contract_problems, run
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import KINDS, obeyed, rules_of
from composer_nb.tasks.rollouts import roll_out
from composer_nb.tasks.ruled import REFUSED, Ruled, formed, in_form, parsed, refusal_hints, unruled
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.tasks.tool_calls_multi_turn import MultiTurn, miscalled

RULES = rules_of(2, kinds=("name_suffix", "constant"))
INSIDE = Files(JsonCalls(), dials=(Difficulty(2), Difficulty(3)), attempts=2)
FAMILY = Ruled(INSIDE, RULES)
CALL = {"name": "mkdir", "arguments": {"dir_name": "drafts"}}


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("partial", [0.0, 0.25])
def test_files_under_rules_keep_the_contract(count, partial):
    for attempts in (1, 2):
        inside = Files(JsonCalls(), attempts=attempts)
        assert (
            contract_problems(Ruled(inside, rules_of(count, seed=count + attempts), partial), 8, seed=count)
            == []
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_leaderboards_turns_under_rules_keep_the_contract(seed):
    rules = rules_of(2, seed=seed)

    def spoil(answers):
        plain = [unruled(answer, rules)[0] for answer in answers]
        return [[formed(answer, rules) for answer in row] for row in miscalled(plain)]

    assert contract_problems(Ruled(MultiTurn(), rules), 3, seed=seed, spoil=spoil) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_is_read_back_and_a_plain_call_that_breaks_it_is_refused(kind):
    rules = rules_of(1, seed=3, kinds=(kind,))
    plain = {"name": "book", "arguments": {"place": "Blue Door", "guests": 4}}
    for answer in (json.dumps(plain), json.dumps([plain, plain])):
        form = formed(answer, rules)
        read, broken, call = unruled(form, rules)
        assert (json.loads(read), broken, call) == (json.loads(answer), (), None)
        assert unruled(answer, rules)[1] == rules, "not alphabetical, so that each kind changes it"


@pytest.mark.parametrize("spoiled", [0, 1])
def test_one_broken_call_of_several_refuses_the_answer(spoiled):
    calls = [obeyed(CALL, RULES), obeyed(CALL, RULES)]
    calls[spoiled] = CALL
    _, broken, call = unruled(json.dumps(calls), RULES)
    assert broken == RULES and call == CALL


def test_a_refused_call_changes_nothing_and_the_accepted_one_does():
    for task in FAMILY.tasks("train", 12, seed=4):
        episode = FAMILY.episode(task)
        for plain, form in zip(INSIDE.reference(task), FAMILY.reference(task)):
            before = repr(episode.inner.world.state)
            refused = episode.step(plain)
            assert repr(episode.inner.world.state) == before and refused.call is None
            assert refused.fault.kind == "execution_error" and refused.said == plain
            assert episode.step(form).right
        outcome = episode.outcome()
        assert outcome.solved and outcome.reward == 1 and len(outcome.turns) == 2 * len(task.requests)


def test_the_conversation_is_what_the_model_said_and_was_told():
    task = FAMILY.tasks("heldout", 1, seed=2)[0]
    episode, opening = FAMILY.episode(task), FAMILY.episode(task).messages()
    said = [INSIDE.reference(task)[0], FAMILY.reference(task)[0], "no call"]
    for text in said:
        episode.step(text)
    messages = episode.messages()[len(opening) :]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == said
    told = [m["content"] for m in messages if m["role"] == "user"]
    assert (
        told[0].count("refused: every function's name must end in") == 1 and task.requests[0].text in told[0]
    )
    assert "refused" not in told[1] and task.requests[1].text in told[1]
    assert episode.messages()[: len(opening)] == opening
    assert [turn.said for turn in episode.outcome().turns] == said


WAYS_AROUND = [
    "Sure: {call}", "{call} {call}", "x{call}", "```json\n{call}\n```", "{call}\nDone.", '{{"a": 1}} {call}',
    "\ufeff{call}", "[{call}",
    '{{"name": "mkdir_v2", "arguments": {{"dir_name": "drafts"}}, "dry_run": false}}',
    '{{"name": "mkdir", "name": "mkdir", "arguments": {{"dir_name": "drafts", "dry_run": false}}}}',
    '[[{call}]]', '{{"name": "mkdir_v2", "arguments": {{"dir_name": "drafts", "dry_run": 0}}}}',
    '{{"call": {call}}}',
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS_AROUND)
@pytest.mark.parametrize("inside", [INSIDE, MultiTurn()], ids=["files", "leaderboard"])
def test_there_is_no_way_around_the_rules(way, inside):
    family = Ruled(inside, RULES)
    task = family.tasks("train" if inside is INSIDE else family.splits[0], 1)[0]
    calls = parsed(inside.reference(task)[0])
    text = way.format(call=json.dumps(CALL | calls[0]))
    outcome = run(family, task, [text, *family.reference(task)[1:]])
    assert not outcome.solved and not outcome.turns[0].right


KEYS = rules_of(2, kinds=("key_of_name", "key_of_arguments"))


@pytest.mark.parametrize(
    "text",
    [
        '{{"{tool}": "zzz", "name": {name}, "{args}": {arguments}}}',
        '{{"{tool}": {name}, "{args}": {{}}, "arguments": {arguments}}}',
        '{{"name": {name}, "{args}": {arguments}, "{tool}": "zzz"}}',
        'Sure: {{"{tool}": {name}, "{args}": {arguments}}}',
        '{{"x": {{"{tool}": {name}, "{args}": {arguments}}}}} at your service',
        'Sure {{"x": {{"name": {name}, "arguments": {arguments}}}}}',
    ],
)
@pytest.mark.parametrize("inside", [INSIDE, MultiTurn()], ids=["files", "leaderboard"])
def test_a_key_beside_its_other_name_or_words_around_the_form_are_refused(inside, text):
    family = Ruled(inside, KEYS, partial=0.3)
    task = family.tasks(family.splits[0], 1)[0]
    call = parsed(inside.reference(task)[0])[0]
    tool, args = obeyed(call, KEYS)
    said = text.format(
        tool=tool, args=args, name=json.dumps(call["name"]), arguments=json.dumps(call["arguments"])
    )
    outcome = run(family, task, [said, *family.reference(task)[1:]])
    assert REFUSED in outcome.turns[0].facts and not outcome.solved


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80) | st.sampled_from(["{", "[", '{"a":', "[{", '{"name":']).map(lambda s: s * 3000))
def test_any_text_is_read(text):
    read, broken, call = unruled(text, RULES)
    assert isinstance(read, str) and set(broken) <= set(RULES) and bool(broken) == (call is not None)
    assert parsed(text) or (read == text and (call is None or {"name", "arguments"} <= call.keys()))


def test_a_text_without_end_is_read_in_no_time():
    for text in ("x" * 10_000_000, '{"a":' * 500_000, "{" * 1_000_000, json.dumps(CALL) + " " * 5_000_000):
        unruled(text, RULES)
    episode = FAMILY.episode(FAMILY.tasks("train", 1)[0])
    assert not episode.step('{"a":' * 100_000).right


def test_words_alone_break_no_rule_and_earn_nothing():
    family = Ruled(INSIDE, RULES, partial=0.5)
    for task in family.tasks("train", 5):
        for claim in CLAIMS:
            outcome = run(family, task, [claim] * 4)
            assert outcome.reward == 0 and all(REFUSED not in turn.facts for turn in outcome.turns)


def test_partial_credit_is_for_the_share_of_rules_kept():
    family, task = Ruled(INSIDE, RULES, partial=0.5), FAMILY.tasks("train", 1)[0]
    half = json.dumps(obeyed(json.loads(INSIDE.reference(task)[0]), RULES[:1]))
    plain, form = INSIDE.reference(task)[0], family.reference(task)[0]
    rewards = [run(family, task, [text] * 4).parts["rules"] for text in (plain, half, form)]
    assert rewards[:2] == [0, 0.25] and rewards[2] == 0.5
    whole = run(family, task, family.reference(task))
    assert whole.solved and whole.reward == pytest.approx(1) and whole.parts["rules"] == 0.5
    late = run(family, task, [plain, *family.reference(task)])
    assert late.solved and late.parts["rules"] == 0.5, "solved is solved"


def test_hints_tell_the_rule_and_no_value_of_the_task():
    rng = random.Random(0)
    for task in FAMILY.tasks("heldout", 20, seed=6):
        number = rng.randrange(len(task.requests))
        answers = [*FAMILY.reference(task)[:number], INSIDE.reference(task)[number]]
        turn = run(FAMILY, task, answers).turns[number]
        hints = FAMILY.hints(turn)
        assert set(hints) == {"refusal", "example", "both", "spelled"} and '_v2"' in hints["spelled"]
        values = [
            str(v) for v in task.requests[number].call.arguments.values() if isinstance(v, str) and len(v) > 2
        ]
        assert not [v for v in values if v in " ".join(hints.values())]
    assert set(refusal_hints(RULES, None, RULES)) == {"refusal", "example", "both"}
    assert set(refusal_hints(RULES, {"name": 3, "arguments": {}}, RULES)) == {"refusal", "example", "both"}


def test_hints_of_the_family_inside_come_in_the_houses_form():
    inner, ruled = 0, 0
    for task in FAMILY.tasks("train", 20, seed=7):
        wrong = json.dumps(obeyed({"name": "mkdirs", "arguments": {}}, RULES))
        turn = run(FAMILY, task, [wrong]).turns[0]
        assert REFUSED not in turn.facts and not turn.right
        for kind, hint in FAMILY.hints(turn).items():
            plain = INSIDE.hints(turn)[kind]
            assert hint == in_form(plain, RULES)
            inner, ruled = inner + plain.count('{"name"'), ruled + hint.count('_v2"')
    assert inner == ruled > 0


@pytest.mark.model
def test_a_rollout_under_rules_lines_up_and_its_refused_turn_is_hinted():
    """Ids of a played episode are the template's, tool words are not scored, and each faulty turn
    is compared.
    """
    tokenizer, task = tiny.tokenizer(), FAMILY.tasks("train", 1, seed=8)[0]
    said = [INSIDE.reference(task)[0], *FAMILY.reference(task)]
    (row,) = roll_out([FAMILY.episode(task)], tokenizer, scripted(said, tokenizer))
    assert row.outcome.solved and row.outcome.faulty == (0,) and not row.stopped
    for (begin, end), text in zip(row.turns, said, strict=True):
        assert tokenizer.decode(row.ids[begin:end], skip_special_tokens=True) == text
    told = tokenizer.decode([i for i, sampled in zip(row.completion_ids, row.sampled) if not sampled])
    assert told.count("refused: every function's name must end in") == 1
    turn = row.outcome.turns[0]
    batch = ComposerDataCollator(tokenizer)([row.rollout(FAMILY.hints(turn)["spelled"], 0)])
    assert assert_aligned(batch, tokenizer) == row.turns[0][1] - row.turns[0][0]


def scripted(lines, tokenizer):
    turn = iter(lines)
    return lambda contexts: [tokenizer(next(turn))["input_ids"] + [tokenizer.eos_token_id] for _ in contexts]


class Gone:
    done = False

    def messages(self):
        return [{"role": "user", "content": "?"}]

    def step(self, text):
        raise EpisodeLost("the server died")


def test_a_lost_world_is_said_to_be_lost():
    episode = FAMILY.episode(FAMILY.tasks("train", 1)[0])
    episode.inner = Gone()
    for text in (json.dumps(CALL), json.dumps(obeyed(CALL, RULES))):
        with pytest.raises(EpisodeLost, match="the server died"):
            episode.step(text)
    assert episode.turns == []


@pytest.mark.parametrize("partial", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(partial):
    with pytest.raises(ValueError, match="a share of the reward"):
        Ruled(INSIDE, RULES, partial)


def test_a_family_without_calls_is_refused():
    with pytest.raises(ValueError, match="files answers without calls in JSON, such as '"):
        Ruled(Files(), RULES)
