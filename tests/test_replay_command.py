"""`composer-nb replay` from a folder of sessions to a data set, interrupted, refused, and at no
double price.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from datasets import disable_progress_bars, load_dataset
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.drills.teacher_server import FaultServer
from composer_nb.replay.dataset import load_pairs
from composer_nb.replay.ledger import Ledger
from composer_nb.replay.plan import read_plan, teachers_of
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.replay.received import Attempt
from composer_nb.traces import Action, TraceState, load_states, save_states

disable_progress_bars()
NAMES = ("tool", "tool_text", "ok")
PRICE = {"prompt": 1e-6, "completion": 4e-6}


def replay(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["replay", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def session(number: int) -> dict:
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "b.py"}'}}
    return {"model": "acme/one", "messages": [
        {"role": "user", "content": f"{number}. What does a.py do? Write to mary@example.org."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no such file", "status": "error"},
        {"role": "assistant", "content": "There is none."},
    ]}  # fmt: skip


def folder_of(place: Path, base_url: str, sessions: int = 3, **more: object) -> Path:
    """Logs of some sessions, read and redacted, and a plan with three priced teachers."""
    (place / "logs").mkdir()
    for i in range(sessions):
        (place / "logs" / f"{i}.jsonl").write_text(json.dumps(session(i)) + "\n")
    assert replay("ingest", place / "logs", "--out", place / "states.jsonl")[0] == 0
    assert replay("redact", place / "states.jsonl", "--out", place / "clean.jsonl")[0] == 0
    prices = {"date": "2026-11-01", "source": "invented", "models": dict.fromkeys(NAMES, PRICE)}
    (place / "prices.json").write_text(json.dumps(prices))
    plan = {"states": "clean.jsonl", "ceiling_usd": 1.0, "prices": "prices.json"}
    plan["teachers"] = [{"model": name, "base_url": base_url} for name in NAMES]
    (place / "replay.yaml").write_text(yaml.safe_dump(plan | more))
    return place / "replay.yaml"


@pytest.fixture
def server():
    with FaultServer() as made:
        yield made


def test_from_a_folder_to_a_data_set(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url)
    assert "mary@example.org" not in (tmp_path / "clean.jsonl").read_text()
    code, said, _ = replay("estimate", plan)
    assert code == 0 and "6 states: 18 calls to make" in said
    code, said, _ = replay("run", plan)
    assert (
        code == 3
        and "Add --pay" in said
        and not server.requests()
        and not (tmp_path / "replies.jsonl").exists()
    )
    assert replay("run", plan, "--pay")[0] == 0 and server.requests().total() == 18
    assert replay("run", plan)[0] == 0 and server.requests().total() == 18  # nothing left to ask: no --pay
    code, said, _ = replay("status", plan)
    assert (
        code == 0
        and "tool: 6 questions, 6 actions, 0 skipped, 0 no reply" in said
        and "0.0000 reserved" in said
    )
    code, said, _ = replay("pairs", plan)
    assert code == 0 and "threshold 2: 3 pair, 3 unlike; 0.17 pairs a call <- this plan" in said
    assert "threshold 3: 6 below_threshold; 0.00 pairs a call\n" in said
    assert said.count(" alone: ") == 3 and "tool alone: 3 pair, 3 unlike; 0.50 pairs a call\n" in said
    assert [p.n_teachers_agreeing for p in load_pairs(tmp_path / "pairs.jsonl")] == [2, 2, 2]
    code, said, _ = replay("export", plan, "--out", tmp_path / "data")
    rows = load_dataset(
        "parquet",
        data_files=str(tmp_path / "data" / "pairs.parquet"),
        split="train",
        cache_dir=str(tmp_path / "c"),
    )
    assert (
        code == 0
        and len(rows) == 3
        and rows[0]["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"path": "b.py"}
    )
    assert (
        json.loads(rows[0]["tools"])[0]["function"]["name"] == "read_file"
    )  # inferred from the session's calls


def test_pairs_for_a_student_are_texts(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1, student="smollm2-135m")
    assert replay("run", plan, "--pay")[0] == 0 and replay("pairs", plan)[0] == 0
    assert replay("export", plan, "--out", tmp_path / "data")[0] == 0
    rows = load_dataset(
        "parquet",
        data_files=str(tmp_path / "data" / "pairs.parquet"),
        split="train",
        cache_dir=str(tmp_path / "c"),
    )
    assert "tools" not in rows.column_names and "<tool_call>" in rows[0]["chosen"][0]["content"]


COMMANDS_TOLD = """
import json, sys
from typer.testing import CliRunner
from composer_nb.cli import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 3), (words, done.output, done.exception)
    print(*words[:2], sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_the_command_line_imports_no_torch(tmp_path, server):
    """A local teacher may stand in the plan: only `run` loads it."""
    plan = folder_of(tmp_path, server.base_url, 1)
    assert replay("run", plan, "--pay")[0] == 0
    told = yaml.safe_load(plan.read_text())
    plan.write_text(yaml.safe_dump(told | {"teachers": [*told["teachers"], {"local": "smollm2-135m"}]}))
    states, clean, out = tmp_path / "states.jsonl", tmp_path / "clean.jsonl", ("--out", tmp_path / "data")
    said = [
        ("--help",), ("replay", "--help"), ("replay", "ingest", tmp_path / "logs", "--out", states),
        ("replay", "redact", states, "--out", clean),
        *(("replay", name, plan) for name in ("estimate", "status", "pairs")),
        ("replay", "view", plan, "--out", tmp_path / "page.html"), ("replay", "export", plan, *out),
        ("replay", "repair", tmp_path / "replies.jsonl"),
    ]  # fmt: skip
    words = [list(map(str, one)) for one in said]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS_TOLD, json.dumps(words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" [", 1) for line in done.stdout.splitlines())
    assert len(found) == len(words) and set(found.values()) == {"]"}, done.stdout


def test_half_a_replay_says_so(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 2)
    told = yaml.safe_load(plan.read_text())
    plan.write_text(yaml.safe_dump(told | {"teachers": told["teachers"][:2]}))
    assert replay("run", plan, "--pay")[0] == 0
    plan.write_text(yaml.safe_dump(told))
    code, said, why = replay("pairs", plan)
    assert code == 3 and "4 questions have no reply yet" in why and "pairs.jsonl: 2 pairs" in said
    assert said.count(" alone: ") == 2 and "0.25 pairs a call <- this plan" in said


def test_a_ceiling_ends_a_run_with_something_left(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 2)
    told, states = read_plan(plan), list(load_states(tmp_path / "clean.jsonl"))
    worst = max(t.worst_case_usd(t.request(s)) for t in teachers_of(told) for s in states)
    ceiling = worst + 1e-4  # room for one call at a time, until a few have been paid
    plan.write_text(yaml.safe_dump(yaml.safe_load(plan.read_text()) | {"ceiling_usd": ceiling}))
    code, _, why = replay("run", plan, "--pay")
    assert code == 3 and "ceiling" in why
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
        assert ledger.committed_usd <= ceiling and 0 < len(ledger) < 12


def test_open_calls_are_listed_and_settled(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1)
    assert replay("run", plan, "--pay")[0] == 0
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        for name in ("tool", "ok"):
            ledger.request_sync(TeacherRequest(name, name, ({"role": "user", "content": "x"},)), 0.25, "s")
        keys = [one.key for one in ledger.open_requests]
    code, said, _ = replay("status", plan)
    assert (
        code == 0 and "0.5000 reserved" in said and f"{keys[0][:16]} tool s: 0.2500 USD, open for 0 s" in said
    )
    code, _, why = replay("settle", tmp_path / "replies.jsonl", "f0f0", "--usd", "0")
    assert code == 1 and "names 0 open calls" in why
    code, said, _ = replay(
        "settle", tmp_path / "replies.jsonl", keys[0][:16], "--usd", "0.01", "--why", "as billed"
    )
    assert code == 0 and "0.2500 reserved" in said
    code, _, why = replay("settle", tmp_path / "replies.jsonl", keys[1], "--usd", "-1")
    assert code == 1 and "negative" in why
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        asked = TeacherRequest("b", "b", ({"role": "user", "content": "x"},))
        asyncio.run(ledger.request(asked, 0.25, "s", "batch-one"))
    code, _, why = replay("settle", tmp_path / "replies.jsonl", asked.key, "--usd", "0")
    assert code == 1 and "in a batch" in why
    assert replay("settle", tmp_path / "replies.jsonl", asked.key, "--usd", "0", "--discard")[0] == 0
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        others = [TeacherRequest("b", "b", ({"role": "user", "content": text},)) for text in "yz"]
        for one in others:
            asyncio.run(ledger.request(one, 0.25, "s", "batch-two"))
    assert replay("settle", tmp_path / "replies.jsonl", "batch-two", "--usd", "0")[0] == 1
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
        before = ledger.committed_usd
    code, said, _ = replay("settle", tmp_path / "replies.jsonl", "batch-two", "--usd", "0.3", "--discard")
    assert code == 0 and "2 settled" in said and not any(one.key[:16] in said for one in others)
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:  # one bill for both, for two of 0.25
        assert ledger.committed_usd == pytest.approx(before - 0.5 + 0.3)
    assert replay("settle", tmp_path / "none.jsonl", "a", "--usd", "0")[0] == 1
    assert not (tmp_path / "none.jsonl").exists()


def test_a_damaged_ledger_is_repaired(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1)
    assert replay("run", plan, "--pay")[0] == 0
    path = tmp_path / "replies.jsonl"
    whole = path.read_bytes().split(b"\n")
    reply = next(line for line in whole if b'"kind":"reply"' in line)
    key = reply.split(b'"key":"')[1][:64]
    came = next(line for line in whole if b'"kind":"received"' in line and key in line)
    for damaged, asked in (
        ([reply], 6),
        ([reply, came], 7),
    ):  # what came can be read again; without it, one is asked again
        path.write_bytes(
            b"\n".join(line.replace(b'"kind"', b'"kine"') if line in damaged else line for line in whole)
        )
        code, _, why = replay("run", plan, "--pay")
        assert code == 1 and "composer-nb replay repair" in why
        code, said, _ = replay("repair", path)
        assert code == 0 and f"{len(damaged)} damaged" in said and "replies.jsonl.damaged" in said
        assert replay("run", plan, "--pay")[0] == 0 and server.requests().total() == asked


def test_errors_are_one_line_and_no_trace(tmp_path):
    for words in (
        ("ingest", tmp_path / "none"), ("redact", tmp_path / "none.jsonl"),
        ("estimate", tmp_path / "none.yaml"), ("run", tmp_path / "none.yaml"),
        ("pairs", tmp_path / "none.yaml"), ("export", tmp_path / "none.yaml"),
        ("status", tmp_path / "none.yaml"), ("repair", tmp_path / "none.jsonl"),
    ):  # fmt: skip
        code, _, why = replay(*words)
        assert (
            code == 1
            and why.splitlines()[-1].startswith(f"composer-nb replay {words[0]}: ")
            and "none" in why
        )
    (tmp_path / "a.jsonl").write_text(json.dumps(session(0)) + "\n{\n")
    code, said, _ = replay("ingest", tmp_path / "a.jsonl", "--out", tmp_path / "states.jsonl")
    assert code == 3 and "1 bad lines" in said and "states.jsonl: 2 states" in said
    code, said, _ = replay(
        "ingest", tmp_path / "a.jsonl", "--out", tmp_path / "errors.jsonl", "--errors-only"
    )
    assert "errors.jsonl: 1 states" in said
    code, _, why = replay("redact", tmp_path / "states.jsonl", "--out", tmp_path / "states.jsonl")
    assert code == 1 and "is the file that is read" in why
    (tmp_path / "tools.json").write_text('{"name": "x"}')
    code, _, why = replay("ingest", tmp_path / "a.jsonl", "--tools", tmp_path / "tools.json")
    assert code == 1 and "not a list of function schemas" in why


def test_what_is_not_redacted_does_not_leave(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1)
    told = yaml.safe_load(plan.read_text())
    plan.write_text(
        yaml.safe_dump(
            told
            | {
                "states": "states.jsonl",
                "teachers": [{"model": "tool", "base_url": "https://example.invalid/v1"}],
            }
        )
    )
    code, _, why = replay("run", plan, "--pay")
    assert code == 1 and "would leave this machine" in why


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"threshold": "two"}, "threshold is 'two', not a int"),
        ({"threshold": True}, "threshold is True"),
        ({"ceiling_usd": "1"}, "ceiling_usd is '1', not a number"),
        ({"ordered": 1}, "ordered is 1, not a bool"),
        ({"teachers": {}}, "teachers is a list"),
        ({"teachers": ["a"]}, "teachers is a list"),
        ({"cieling": 1}, "unknown cieling"),
        ({"states": 3}, "states is 3"),
        ({"pairs": "replies.jsonl"}, "four names"),
        ({"ledger": "a"}, "four names"),
    ],
)
def test_a_wrong_plan_is_refused_by_field(tmp_path, change, reason):
    plan = {"states": "a", "teachers": [{"model": "x"}], "ceiling_usd": 1}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(plan | change))
    with pytest.raises(ValueError, match=reason):
        read_plan(tmp_path / "p.yaml")


def test_teachers_of_a_plan(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "states: a\nceiling_usd: 1\nteachers:\n"
        "- {model: x/y, base_url: 'http://127.0.0.1:1/v1', max_tokens: 9}\n"
        "- {local: smollm2-135m, name: small, max_tokens: 7}\n"
    )
    remote, local = teachers_of(read_plan(tmp_path / "p.yaml"), weights=False)
    assert (remote.model, remote.settings.max_tokens) == ("x/y", 9)
    assert (local.name, local.model, local.max_tokens) == ("small", "smollm2-135m", 7)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_keeps_what_was_paid_and_goes_on(tmp_path, sign):
    with FaultServer(delay_s=0.4) as server:
        plan = folder_of(tmp_path, server.base_url, 12)
        told = yaml.safe_load(plan.read_text())
        plan.write_text(
            yaml.safe_dump(told | {"teachers": [one | {"concurrency": 2} for one in told["teachers"]]})
        )
        command = [
            sys.executable,
            "-c",
            "from composer_nb.cli import main; main()",
            "replay",
            "run",
            str(plan),
            "--pay",
        ]
        own = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=own,
        )
        end = time.monotonic() + 120
        while server.billed().total() < 4 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(sign)
        why = process.communicate(timeout=60)[1]
        assert process.returncode == 130 and "interrupted; run it again" in why
        paid = server.billed().total()
        with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
            assert 4 <= len(ledger) == paid < 72 and not ledger.open_requests
        assert replay("run", plan, "--pay")[0] == 0
        assert server.billed().total() == 72


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        ({"model": 5}, "model: 5 is no text"), ({"local": None}, "local: None is no text"),
        ({"model": "x", "max_tokens": "1e3"}, "max_tokens: '1e3' is no number"),
        ({"model": "x", "max_tokens": None}, "max_tokens"),
        ({"model": "x", "max_tokens": -1}, "max_tokens: -1 is less than 1"),
        ({"model": "x", "temperature": "1e-1"}, "temperature"),
        ({"model": "x", "accept_models": "some/other"}, "accept_models"),
        ({"model": "x", "concurrency": True}, "concurrency"),
        ({"model": "x", 5: 1}, "5: 1"),
    ],
)  # fmt: skip
def test_a_wrong_teacher_is_refused_with_its_number(tmp_path, teacher, reason):
    plan = {"states": "a", "teachers": [{"model": "y", "temperature": None}, teacher], "ceiling_usd": 1}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ValueError, match=f"teacher 2: {reason}"):
        teachers_of(read_plan(tmp_path / "p.yaml"), weights=False)


def test_nothing_of_the_user_is_overwritten(tmp_path, server):
    log = tmp_path / "a.jsonl"
    log.write_text(content := json.dumps(session(0)) + "\n")
    code, _, why = replay("ingest", log, "--out", log)
    assert code == 1 and "among the logs" in why and log.read_text() == content
    code, _, why = replay("ingest", tmp_path, "--out", tmp_path / "states.jsonl")
    assert code == 1 and "name a place outside" in why and not (tmp_path / "states.jsonl").exists()
    (place := tmp_path / "w").mkdir()
    plan = folder_of(place, server.base_url, 1)
    assert replay("run", plan, "--pay")[0] == 0 and replay("pairs", plan)[0] == 0
    for _ in range(2):
        assert replay("export", plan, "--out", place / "data")[0] == 0
    (place / "data" / "README.md").write_text("mine")
    assert replay("export", plan, "--out", place / "data")[0] == 0
    assert (place / "data" / "README.md.before").read_text() == "mine"


def test_a_teacher_of_the_acting_vendor_has_no_question(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1)
    records = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text().splitlines()]
    (tmp_path / "clean.jsonl").write_text("".join(json.dumps(r | {"model": "gpt-5"}) + "\n" for r in records))
    told = yaml.safe_load(plan.read_text())
    plan.write_text(
        yaml.safe_dump(
            told
            | {
                "teachers": [
                    *told["teachers"],
                    {
                        "model": "gpt-x/tool",
                        "name": "own",
                        "base_url": server.base_url,
                        "accept_models": ["tool"],
                    },
                ]
            }
        )
    )
    prices = json.loads((tmp_path / "prices.json").read_text())
    prices["models"]["gpt-x/tool"] = PRICE
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    code, said, _ = replay("status", plan)  # before any run: no ledger yet
    assert code == 0 and "tool: 2 questions" in said
    assert replay("run", plan, "--pay")[0] == 0
    assert replay("pairs", plan)[0] == 0


def test_an_action_whose_text_reads_as_something_else_is_exported_as_it_was():
    from composer_nb.replay.dataset import preference_row
    from composer_nb.replay.pairs import extract_dpo_pairs
    from composer_nb.traces import Action, ToolCall, TraceState

    odd = Action("", (ToolCall("write", {"content": "a <think>x</think> b </tool_call>"}),))
    state = TraceState(
        "s", [{"role": "user", "content": "q"}], Action("", (ToolCall("write", {"content": "c"}),))
    )
    (pair,) = extract_dpo_pairs([state], {"s": {"a": odd, "b": odd}})
    row = preference_row(pair)
    assert row["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {
        "content": "a <think>x</think> b </tool_call>"
    }
    assert "rejected_message" not in pair.provenance


def test_torn_contexts_are_told_of_mended_and_refused_before_anything_is_paid(tmp_path, server):
    plan = folder_of(tmp_path, server.base_url, 1)
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    torn = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "stop"},
    ]
    record = json.loads((tmp_path / "clean.jsonl").read_text().splitlines()[0])
    odd = [{"role": "user", "content": "go"}, {"role": "observer", "content": "hm"}]
    lines = [
        record | {"state_id": id, "messages": messages} for id, messages in (("torn", torn), ("odd", odd))
    ]
    (tmp_path / "clean.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = (
        "1 contexts mended (1 with a result inserted), "
        "1 refused (1: has role 'observer'; known: system, developer, user, assistant, tool, function)"
    )
    code, said, _ = replay("estimate", plan)
    assert code == 0 and told in said and "2 states: 3 calls to make" in said
    code, said, _ = replay("run", plan, "--pay")
    assert code == 0 and told in said and server.requests().total() == 3 and "1 skipped" in said
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
        asked = [
            teacher.request(state)
            for teacher in teachers_of(read_plan(plan))
            for state in load_states(tmp_path / "clean.jsonl")
            if state.state_id == "torn"
        ]
        assert all(ledger.known(request.key) is None for request in asked), (
            "as the log has it, nobody was asked"
        )
    assert "tool: 1 questions, 1 actions, 0 skipped, 0 no reply" in replay("status", plan)[1]
    assert replay("pairs", plan)[0] == 0
    (pair,) = load_pairs(tmp_path / "pairs.jsonl")
    assert [m["role"] for m in pair.state_messages] == [
        "user",
        "assistant",
        "tool",
        "user",
    ] and pair.state_messages[2]["content"] == "aborted"


def test_personal_data_stays_where_it_is_asked_to(tmp_path):
    """What `redact` was told to leave, `run` sends only if the plan says the same."""
    said = "call +49 30 901820 about card 4111 1111 1111 1111, key AKIAIOSFODNN7EXAMPLQ"
    save_states(
        [TraceState("s/0", [{"role": "user", "content": said}], Action("x"))], tmp_path / "states.jsonl"
    )

    def redacted(*words):
        assert replay("redact", tmp_path / "states.jsonl", "--out", tmp_path / "clean.jsonl", *words)[0] == 0
        return (tmp_path / "clean.jsonl").read_text()

    assert "901820" not in redacted() and "4111" not in redacted()
    assert "901820" in redacted("--no-personal") and "4111 1111" in redacted("--no-personal")
    some = redacted("--kind", "phone number")
    assert "901820" not in some and "4111 1111" in some and "AKIA" not in some
    code, _, why = replay("redact", tmp_path / "states.jsonl", "--no-personal", "--kind", "login")
    assert code == 1 and "leave one of them out" in why
    assert "give a list out of" in replay("redact", tmp_path / "states.jsonl", "--kind", "shoe size")[2]
    teacher = {"model": "v/m", "base_url": "https://example.org/v1"}
    prices = {"date": "d", "source": "s", "models": {"v/m": PRICE}}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    plan = {"states": "clean.jsonl", "teachers": [teacher], "ceiling_usd": 1, "prices": "prices.json"}
    for told, wanted in (
        ({}, 1),
        ({"personal": False}, 0),
        ({"personal": ["phone number"]}, 0),
        ({"personal": ["payment card"]}, 1),
    ):
        (tmp_path / "p.yaml").write_text(json.dumps(plan | told))
        assert replay("estimate", tmp_path / "p.yaml")[0] == wanted, told
    (tmp_path / "p.yaml").write_text(json.dumps(plan | {"personal": ["shoe size"]}))
    assert "personal is true, false or a list out of" in replay("estimate", tmp_path / "p.yaml")[2]


def test_a_seller_whose_prices_are_not_known_is_refused(tmp_path):
    """OpenRouter's list says nothing of what another seller of the same model asks."""
    teacher = {"model": "deepseek/deepseek-v3.2", "base_url": "https://api.elsewhere.example/v1"}
    told = {"states": "s.jsonl", "ceiling_usd": 1, "teachers": [teacher]}
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(told))
    with pytest.raises(ValueError, match="teacher 1: api.elsewhere.example is not OpenRouter"):
        teachers_of(read_plan(tmp_path / "replay.yaml"))
    asked = [{"role": "user", "content": "Which?"}]
    save_states([TraceState("s/0", asked, Action("this"))], tmp_path / "s.jsonl")
    code, _, why = replay("run", tmp_path / "replay.yaml", "--pay")
    assert code == 1 and "is not OpenRouter" in why
    assert "1 no reply" in replay("status", tmp_path / "replay.yaml")[1]  # to look costs nothing
    prices = {"date": "d", "source": "s", "models": {teacher["model"]: PRICE}}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(told | {"prices": "prices.json"}))
    assert teachers_of(read_plan(tmp_path / "replay.yaml"))[0].price.prompt == PRICE["prompt"]
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(told | {"prices": "none.json"}))
    with pytest.raises(ValueError, match="teacher 1: .*none.json: No such file"):
        teachers_of(read_plan(tmp_path / "replay.yaml"))


def test_a_local_model_that_is_not_there_is_named(tmp_path):
    told = {"states": "s.jsonl", "ceiling_usd": 1, "teachers": [{"local": str(tmp_path / "no-model")}]}
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(told))
    with pytest.raises(ValueError, match="teacher 1: .*no-model") as refused:
        teachers_of(read_plan(tmp_path / "replay.yaml"))
    assert "None" not in str(refused.value)


def test_a_question_with_a_vendors_own_tool_is_not_asked_and_an_old_answer_is_read(tmp_path, server):
    """It would be run by the vendor, at a price of its own; what was answered once stands on disk."""
    plan, states = with_vendor_tool(tmp_path, server)
    code, said, _ = replay("run", plan, "--pay")
    assert code == 0 and "0 actions" in said and not server.books.read()
    assert f"{len(states)} skipped" in replay("status", plan)[1]
    teacher = teachers_of(read_plan(plan))[0]
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        for state in states:
            asked = teacher.request(state)
            asyncio.run(ledger.request(asked, 0.25, state.state_id))
            before = TeacherReply(asked.key, teacher.name, Action("as before"), cost_usd=0.0)
            ledger.reply_sync(before)
    assert f"{len(states)} actions" in replay("status", plan)[1]


def with_vendor_tool(tmp_path: Path, server: FaultServer) -> tuple[Path, list[TraceState]]:
    """A plan whose states offer a vendor's own tool, and these states."""
    plan = folder_of(tmp_path, server.base_url, 1)
    search = {"type": "web_search_20250305", "name": "web_search"}
    states = [replace(state, tools=(search,)) for state in load_states(tmp_path / "clean.jsonl")]
    save_states(states, tmp_path / "clean.jsonl")
    return plan, states


def test_an_answer_that_came_unread_is_read_though_its_question_would_not_be_asked(tmp_path, server):
    plan, states = with_vendor_tool(tmp_path, server)
    teacher = teachers_of(read_plan(plan))[NAMES.index("ok")]
    message = {"role": "assistant", "content": "as before"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 5, "completion_tokens": 5}
    body = json.dumps({"model": "ok", "choices": choices, "usage": usage}).encode()
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        for state in states:
            attempt = asyncio.run(ledger.request(asked := teacher.request(state), 0.25, state.state_id))
            asyncio.run(ledger.received(asked, attempt, Attempt(200, body)))
    assert replay("run", plan, "--pay")[0] == 0 and not server.books.read()
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
        found = [ledger.find(teacher.request(state)) for state in states]
        assert [reply.action.text for reply in found] == ["as before"] * len(states)
        assert not ledger.open_requests


def test_a_vendors_tool_reserves_nothing_where_a_busy_endpoint_refused_it_before(tmp_path, server):
    """Such a refusal is asked again, which this question is not."""
    plan, states = with_vendor_tool(tmp_path, server)
    teacher = teachers_of(read_plan(plan))[0]
    busy = {"action": None, "outcome": "skipped", "reason": "http_429", "cost_usd": 0.0}
    with Ledger(tmp_path / "replies.jsonl") as ledger:
        for state in states:
            asyncio.run(ledger.request(asked := teacher.request(state), 0.25, state.state_id))
            ledger.reply_sync(TeacherReply(asked.key, teacher.name, **busy))
    assert replay("run", plan, "--pay")[0] == 0 and not server.books.read()
    with Ledger(tmp_path / "replies.jsonl", offline=True) as ledger:
        assert not ledger.open_requests and ledger.committed_usd == 0


def test_what_an_unknown_seller_was_paid_is_not_told_by_openrouters_list(tmp_path):
    told = {"states": "s.jsonl", "ceiling_usd": 1, "teachers": [
        {"model": "deepseek/deepseek-v3.2", "base_url": "https://api.elsewhere.example/v1"},
        {"model": "deepseek/deepseek-v3.2"}]}  # fmt: skip
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(told))
    other, ours = teachers_of(read_plan(tmp_path / "replay.yaml"), priced=False)
    assert other.price is None and ours.price is not None
