"""A replay on several workers: nothing is lost, nothing is paid for twice but what was in flight at a kill,
and all together stay below the ceiling.

The server is a process of its own that survives, and its log is what was really asked and charged.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import until

from composer_nb.cli import app
from composer_nb.drills.slurm_cluster import SlurmCluster
from composer_nb.launch.entrypoint import marked
from composer_nb.launch.fan_out import FanOut, fan_out, was_lost
from composer_nb.launch.job import ReplicaResult
from composer_nb.launch.local import LocalProcessExecutor
from composer_nb.launch.slurm import SlurmExecutor
from composer_nb.launch.slurm_commands import SlurmOptions
from composer_nb.replay.ledger import Ledger, LedgerInUse
from composer_nb.replay.plan import read_plan, teachers_of
from composer_nb.replay.shards import in_parts, part_of, part_path, parts_there
from composer_nb.traces import Action, ContextReport, TraceState, load_states, save_states

PLACES = 4


@pytest.fixture
def server(tmp_path):
    log = tmp_path / "calls.jsonl"
    words = [sys.executable, "-m", "composer_nb.drills.teacher_server", "--delay-ms", "80", "--log", str(log)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["base_url"], log
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(server) -> Counter[str]:
    "How often each question was put."
    lines = map(json.loads, server[1].read_text().splitlines())
    return Counter(line["content"] for line in lines if line["event"] == "request")


def plan_in(folder, server, texts, ceiling=1.0, **more) -> Path:
    asks = [[{"role": "user", "content": text}] for text in texts]
    states = [TraceState(f"s/{n}", messages, Action("no")) for n, messages in enumerate(asks)]
    save_states(states, folder / "states.jsonl")
    price = {"vendor/ok": {"prompt": 1e-6, "completion": 2e-6}}
    told = {"date": "2026-11-20", "source": "invented", "models": price}
    (folder / "prices.json").write_text(json.dumps(told))
    teacher = {"model": "vendor/ok", "base_url": server[0], "max_tokens": 16, "concurrency": PLACES} | more
    plan = {"states": "states.jsonl", "ceiling_usd": ceiling, "prices": "prices.json", "teachers": [teacher]}
    (folder / "plan.yaml").write_text(json.dumps(plan))  # JSON is YAML
    return folder / "plan.yaml"


def known(plan: Path) -> int:
    told = read_plan(plan)
    (teacher,) = teachers_of(told)
    with Ledger(told.ledger, offline=True) as book:
        return sum(book.find(teacher.request(state)) is not None for state in load_states(told.states))


def local(folder, **options):
    return LocalProcessExecutor(folder / "work", threads=1, **{"grace_s": 1} | options)


def worker_of(handle):
    "The process of a life."
    mark = f"rank{handle.rank}-run{handle.incarnation}.{handle.launch}"
    ours = [pid for pid in marked(mark) if b"job.json" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return min(ours, default=None)


class Kills:
    "SIGKILL to workers, each once it is at work and so many questions were put."

    def __init__(self, executor, server, ranks, every=30):
        self.executor, self.server, self.ranks, self.every = executor, server, ranks, every
        self.killed = 0

    def launch_replicas(self, *words, **more):
        handles = self.executor.launch_replicas(*words, **more)
        threading.Thread(target=self.run, args=(handles,), daemon=True).start()
        return handles

    def run(self, handles):
        for n, rank in enumerate(self.ranks, 1):
            until(lambda n=n: sum(asked(self.server).values()) >= n * self.every, 60)
            if (pid := worker_of(handles[rank])) is not None:
                os.kill(pid, signal.SIGKILL)
                self.killed += 1

    def __getattr__(self, name):
        return getattr(self.executor, name)


@pytest.fixture(scope="module")
def slurm():
    if reason := SlurmCluster.reason():
        pytest.skip(f"not run: {reason}")
    with SlurmCluster() as made:
        yield made


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_two_hundred_states_four_workers_and_kills(tmp_path, server, kind, request):
    if kind == "slurm":
        request.getfixturevalue("slurm")
        options = SlurmOptions(poll_s=0.4, lag_s=1.0)
        executor = SlurmExecutor(tmp_path / "work", threads=1, grace_s=1, options=options)
    else:
        executor = local(tmp_path)
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(200)])
    with executor:
        kills = Kills(executor, server, [1, 2, 3])
        found = fan_out(plan, kills, 4, progress=False)
    calls = asked(server)
    assert kills.killed == found.restarts == 3 and found.reasons == []
    assert len(calls) == 200 == known(plan) and found.lines >= 400
    assert sum(calls.values()) - 200 <= 3 * PLACES
    assert [r.incarnation for r in found.results] == [0, 1, 1, 1]
    assert parts_there(read_plan(plan).ledger) == []
    with Ledger(read_plan(plan).ledger, offline=True) as book:
        assert book.open_requests == () or len(book.open_requests) <= 3 * PLACES


def test_the_launcher_is_killed_and_the_next_one_takes_in_what_is_there(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(120)])
    script = """
        import sys
        from pathlib import Path
        from test_fan_out import fan_out, local
        fan_out(sys.argv[1], local(Path(sys.argv[1]).parent), 4, progress=False)
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", textwrap.dedent(script), str(plan)]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}) as launcher:
        until(lambda: sum(asked(server).values()) >= 40, 60)
        launcher.kill()
    ledger = read_plan(plan).ledger
    assert len(parts_there(ledger)) == 4
    until(lambda: all(not Path(f"{part}.lock").exists() or _free(part) for part in parts_there(ledger)), 20)
    before = sum(asked(server).values())
    assert before < 120
    with local(tmp_path) as executor:
        found = fan_out(plan, executor, 3, progress=False)  # another number of workers
    calls = asked(server)
    assert found.reasons == [] and len(calls) == 120 == known(plan)
    assert sum(calls.values()) - 120 <= 4 * PLACES


def _free(part) -> bool:
    try:
        Ledger(part).close()
    except LedgerInUse:
        return False
    return True


def test_all_together_stay_below_the_ceiling_and_one_uses_up_the_rest(tmp_path, server):
    texts = [f"question {n}" for n in range(60)]
    plan = plan_in(tmp_path, server, texts)
    (teacher,) = teachers_of(read_plan(plan))
    worst = teacher.worst_case_usd(teacher.request(next(iter(load_states(tmp_path / "states.jsonl")))))
    ceiling = 8 * worst  # two at once for each worker, and its share shrinks with every answer
    plan, answers = plan_in(tmp_path, server, texts, ceiling=ceiling), []
    for workers in (4, 1):  # what is left is too little for four
        with local(tmp_path) as executor:
            found = fan_out(plan, executor, workers, progress=False)
        with Ledger(read_plan(plan).ledger, offline=True) as book:
            assert book.committed_usd <= ceiling + 1e-12
        assert any("ceiling" in reason for reason in found.reasons)
        answers.append(known(plan))
    assert 8 <= answers[0] < answers[1] < 60


def test_what_a_worker_met_itself_is_told_and_not_tried_again(tmp_path, server, monkeypatch):
    "A key that the executor was not told to hand on, here."
    monkeypatch.setenv("FAN_OUT_KEY", "sesame-open-1234")
    plan = plan_in(tmp_path, server, ["one", "two", "three"], api_key_env="FAN_OUT_KEY")
    with local(tmp_path) as executor:
        found = fan_out(plan, executor, 2, progress=False)
    assert found.restarts == 0 and known(plan) == 0 and asked(server) == Counter()
    assert len(found.reasons) == 1 and "FAN_OUT_KEY is empty or not set" in found.reasons[0]
    with local(tmp_path, env=["FAN_OUT_KEY"]) as executor:
        assert fan_out(plan, executor, 2, progress=False).reasons == [] and known(plan) == 3
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("sesame" in text for text in texts)
    with open(tmp_path / "states.jsonl", "a") as states:
        states.write("no state\n")
    with local(tmp_path, env=["FAN_OUT_KEY"]) as executor:
        found = fan_out(plan, executor, 2, progress=False)
    assert found.restarts == 0 and [r.status for r in found.results] == ["failed"] * 2
    assert all("states.jsonl" in reason for reason in found.reasons)


def test_a_worker_that_is_killed_again_and_again_is_given_up(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(100)])

    class Always(Kills):
        def run(self, handles):
            end = time.monotonic() + 60
            while time.monotonic() < end and self.killed < 3:
                for handle in [h for h in self.executor._register.lives if h.rank == 0]:
                    if (pid := worker_of(handle)) is not None:
                        os.kill(pid, signal.SIGKILL)
                        self.killed += 1
                time.sleep(0.05)

    with local(tmp_path) as executor:
        found = fan_out(plan, Always(executor, server, [0]), 2, restarts=1, progress=False)
    assert found.restarts == 1 and found.results[0].status == "failed"
    assert len(found.reasons) == 1 and "SIGKILL" in found.reasons[0]
    assert 0 < known(plan) < 100  # the other's answers are in the ledger


def test_an_interrupt_ends_the_workers_and_keeps_the_answers(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(200)])
    with local(tmp_path) as executor:

        class Impatient(Kills):
            def run(self, handles):
                until(lambda: sum(asked(self.server).values()) >= 40, 60)
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                fan_out(plan, Impatient(executor, server, []), 4, progress=False)
        finally:
            signal.signal(signal.SIGINT, before)
        lives = list(executor._register.lives)
        assert [executor.poll(handle) for handle in lives] == ["cancelled"] * 4
    assert parts_there(read_plan(plan).ledger) == [] and known(plan) >= 40 - 4 * PLACES


def test_an_interrupt_ends_those_that_were_begun_again_too(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(300)])

    class Both(Kills):
        def run(self, handles):
            super().run(handles)  # one is killed and begun again
            until(lambda: any(h.incarnation for h in self.executor._register.lives), 60)
            until(lambda: any(worker_of(h) for h in self.executor._register.lives if h.incarnation), 60)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with local(tmp_path) as executor:
            with pytest.raises(KeyboardInterrupt):
                fan_out(plan, Both(executor, server, [1]), 3, progress=False)
            lives = list(executor._register.lives)
            assert len(lives) == 4 and "running" not in [executor.poll(handle) for handle in lives]
            assert parts_there(read_plan(plan).ledger) == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_worker_whose_part_is_gone_asks_nobody(tmp_path, server):
    "It waited in a queue while its launcher died, and another fan-out took its part in."
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(8)])
    with local(tmp_path) as executor:
        assert fan_out(plan, executor, 2, progress=False).reasons == []
        before = sum(asked(server).values())
        late = executor.launch_replicas(2, "composer_nb.launch.fan_out:work", [str(plan), "0badcafe"])
        results = executor.collect(late, timeout=60)
    assert all("is gone: this worker's fan-out is over" in r.error for r in results)
    assert sum(asked(server).values()) == before and parts_there(read_plan(plan).ledger) == []


def test_what_was_not_asked_is_told(tmp_path, server):
    "Here one question at worst is more than a worker's share, so none is put."
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(8)])
    (teacher,) = teachers_of(read_plan(plan))
    worst = teacher.worst_case_usd(teacher.request(next(iter(load_states(tmp_path / "states.jsonl")))))
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(8)], ceiling=2 * worst)
    with local(tmp_path) as executor:
        found = fan_out(plan, executor, 4, progress=False)
    assert asked(server) == Counter() and found.reasons
    assert all("more than the whole ceiling" in reason for reason in found.reasons)


def test_contexts_that_mending_makes_equal_are_in_one_part():
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plain.append({"role": "user", "content": "c"})
    mended = [*plain[:1], {"role": "assistant", "content": ""}, *plain[1:]]
    one, two = (TraceState("s", messages, Action("no")) for messages in (plain, mended))
    sent = [ContextReport().taken(state).messages for state in (one, two)]
    assert [list(m) for m in sent[:1]] == [list(m) for m in sent[1:]], "mending has changed: choose another"
    assert all(part_of(one, n) == part_of(two, n) for n in range(1, 60))


def test_equal_questions_are_put_once(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n % 5}" for n in range(40)])
    with local(tmp_path) as executor:
        found = fan_out(plan, executor, 4, progress=False)
    assert found.reasons == [] and sum(asked(server).values()) == 5 and known(plan) == 40


@pytest.mark.parametrize("wrong, words", [
    ({"workers": 0}, "count=0"), ({"workers": True}, "count=True"), ({"workers": 2.0}, "count=2.0"),
    ({"restarts": -1}, "restarts=-1"), ({"restarts": 1.5}, "restarts=1.5"),
])  # fmt: skip
def test_numbers_that_make_no_sense(tmp_path, server, wrong, words):
    plan = plan_in(tmp_path, server, ["a"])
    with local(tmp_path) as executor, pytest.raises(ValueError, match=words):
        fan_out(plan, executor, **{"workers": 2} | wrong)
    assert parts_there(read_plan(plan).ledger) == []


# --- parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path, server):
    "One with three answers."
    plan = plan_in(tmp_path, server, ["a", "b", "c"])
    with local(tmp_path) as executor:
        fan_out(plan, executor, 1, progress=False)
    return read_plan(plan).ledger


def test_a_join_that_is_repeated_adds_nothing(ledger, tmp_path):
    whole = ledger.read_bytes()
    lines = whole.split(b"\n")
    ledger.write_bytes(b"\n".join(lines[:3]) + b"\n")  # the first of its answers
    (tmp_path / "kept").write_bytes(whole)
    for _ in range(2):  # the launcher died between the lines and the removal of the part
        shutil.copy(tmp_path / "kept", part_path(ledger, 0, "0badcafe"))
        with in_parts(ledger):
            pass
        assert sorted(ledger.read_bytes().split(b"\n")) == sorted(lines)


def test_a_damaged_part_changes_nothing(ledger):
    before = ledger.read_bytes()
    damaged = before + b'{"kind": "reply", "of": "nobody"}\n' + before.split(b"\n")[1]
    part_path(ledger, 0, "0badcafe").write_bytes(damaged)
    with pytest.raises(ValueError, match="part0"), in_parts(ledger):
        pass
    assert ledger.read_bytes() == before and part_path(ledger, 0, "0badcafe").exists()


def test_a_part_or_a_ledger_in_use_is_named(ledger):
    with Ledger(ledger), pytest.raises(LedgerInUse), in_parts(ledger):
        pass
    shutil.copy(ledger, part_path(ledger, 1, "0badcafe"))
    with Ledger(part_path(ledger, 1, "0badcafe")):
        with pytest.raises(LedgerInUse, match="part1"), in_parts(ledger):
            pass
    with in_parts(ledger) as sheaf:
        (part,) = sheaf.cut(1)
        assert part.read_bytes() == ledger.read_bytes() and part.stat().st_mode & 0o077 == 0


def test_other_files_are_no_parts(tmp_path):
    ours = [f"r.jsonl.part{n}-0badcafe" for n in (1, 2, 10)]
    for name in (*ours[::-1], f"{ours[1]}.lock", "r.jsonl.part3", "r.jsonl.party", "x"):
        (tmp_path / name).touch()
    assert [path.name for path in parts_there(tmp_path / "r.jsonl")] == ours


def test_a_part_follows_from_the_context_alone():
    def state(id, text, **more):
        return TraceState(id, [{"role": "user", "content": text}], Action("no"), **more)

    for n in range(20):
        one = part_of(state("s/1", f"text {n}"), 7)
        assert 0 <= one < 7
        assert one == part_of(state("s/2", f"text {n}", model="other"), 7)
    swapped = TraceState("s/3", [{"content": "text 3", "role": "user"}], Action("no"))
    assert part_of(swapped, 7) == part_of(state("s/1", "text 3"), 7)
    assert len({part_of(state("s", f"{n}"), 7) for n in range(100)}) == 7
    part_of(state("s/4", "a lone \ud800 surrogate"), 3)


def test_who_is_begun_again():
    def ended(status, code):
        return ReplicaResult(0, code, None, None, status, 0)

    lost = [("failed", -9), ("failed", None), ("hung", -15)]
    kept = [("failed", 1), ("succeeded", 0), ("cancelled", -15), ("timed_out", -15)]
    assert [was_lost(ended(*one)) for one in lost + kept] == [True] * 3 + [False] * 4
    assert FanOut().reasons == []


def test_from_a_shell(tmp_path, server):
    plan = plan_in(tmp_path, server, [f"question {n}" for n in range(12)])
    shell = CliRunner()
    said = shell.invoke(app, ["replay", "fan-out", str(plan), "--workers", "2"])
    assert said.exit_code == 3, said.output
    assert "Add --pay" in said.output and asked(server) == Counter()
    said = shell.invoke(app, ["replay", "fan-out", str(plan), "--workers", "2", "--pay"])
    assert said.exit_code == 0 and known(plan) == 12, said.output
    said = shell.invoke(app, ["replay", "fan-out", str(plan), "--workers", "2"])
    assert said.exit_code == 0 and sum(asked(server).values()) == 12
    said = shell.invoke(app, ["replay", "fan-out", str(tmp_path / "none.yaml"), "--workers", "2"])
    assert said.exit_code == 1 and "none.yaml" in said.output
