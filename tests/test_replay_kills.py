"""A replay that is killed at random moments and resumed: nothing is lost, nothing paid twice, the ceiling
holds.

The server is a process of its own that survives, and its log is what was really asked and charged.
"""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_nb.replay.http_teacher import HTTPTeacher
from composer_nb.replay.ledger import Ledger
from composer_nb.replay.prices import Price, Prices
from composer_nb.traces import Action, TraceState, save_states

SERVER = ["-m", "composer_nb.drills.teacher_server"]
MODEL, PLACES = "vendor/ok", 8


def states(count: int) -> list[TraceState]:
    return [
        TraceState(f"s/{i}", [{"role": "user", "content": f"question {i} " + "x" * (i % 50)}], Action("no"))
        for i in range(count)
    ]


def teacher(base_url: str) -> HTTPTeacher:
    prices = Prices("2026-11-20", "the server's own", {MODEL: Price(1e-6, 2e-6)})
    return HTTPTeacher(MODEL, base_url, name="t", prices=prices, max_tokens=16)


CLIENT = """
import json, sys
from composer_nb.replay.http_teacher import HTTPTeacher
from composer_nb.replay.prices import Price, Prices
from composer_nb.replay.runner import replay_trace_sync
from composer_nb.traces import load_states
base_url, states, ledger, ceiling = sys.argv[1:]
prices = Prices("2026-11-20", "the server's own", {"vendor/ok": Price(1e-6, 2e-6)})
teacher = HTTPTeacher("vendor/ok", base_url, name="t", prices=prices, max_tokens=16, concurrency=8)
print("ready", flush=True)
out = replay_trace_sync(load_states(states), [teacher], float(ceiling), ledger=ledger, concurrency=8,
                        progress=False)
print(json.dumps({"calls": out.calls, "halted": out.halted, "actions": sum(map(len, out.actions.values()))}))
"""


@dataclass
class Server:
    base_url: str
    log: Path

    def count(self, event: str) -> Counter[str]:
        "How often each question met `event`."
        lines = map(json.loads, self.log.read_text().splitlines())
        return Counter(line["content"] for line in lines if line["event"] == event)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    log = tmp_path / "calls.jsonl"
    command = [sys.executable, *SERVER, "--delay-ms", "40", "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(json.loads(process.stdout.readline())["base_url"], log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_and_kill(arguments: list[str], server: Server, delay_s: float, while_starting: bool) -> None:
    "Kill it `delay_s` after it began to ask, or after it began at all."
    before = server.log.stat().st_size
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        while not while_starting and server.log.stat().st_size == before and process.poll() is None:
            time.sleep(0.001)
        time.sleep(delay_s)
        assert process.poll() is None, "it ended before it was killed"
        process.kill()


def run_to_the_end(arguments: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def contents(count: int, base_url: str) -> dict[str, tuple[str, str, float]]:
    "Per question: the server's name for it, the ledger's key, and what one answer costs."
    found = {}
    for state in states(count):
        request = teacher(base_url).request(state)
        content = hashlib.sha256(
            json.dumps([MODEL, list(request.messages)], sort_keys=True).encode()
        ).hexdigest()
        text = state.messages[-1]["content"]
        found[state.state_id] = content, request.key, (len(text) // 4 + 10) * 1e-6 + 12 * 2e-6
    return found


def kill_and_resume(
    server: Server, arguments: list[str], keys: list[str], *, kills: int, seed: int
) -> list[int]:
    "Kill `kills` times at random moments; requests left open after each. A reply seen once must stay."
    rng, seen, left_open, path = random.Random(seed), {}, [], Path(arguments[2])
    for _ in range(kills):
        run_and_kill(arguments, server, rng.uniform(0, 0.2), while_starting=rng.random() < 0.2)
        with Ledger(path, offline=True) if path.exists() else Ledger(None) as ledger:
            now = {key: reply for key in keys if (reply := ledger.known(key))}
            left_open.append(len(ledger.open_requests))
        assert seen.items() <= now.items()
        seen = now
    return left_open


def prepare(server: Server, tmp_path: Path, count: int, ceiling: float) -> list[str]:
    "Arguments of the client."
    save_states(states(count), tmp_path / "states.jsonl")
    return [server.base_url, str(tmp_path / "states.jsonl"), str(tmp_path / "replay.jsonl"), str(ceiling)]


def test_twenty_kills_then_the_end(server: Server, tmp_path: Path) -> None:
    count, ceiling = 700, 1.0
    arguments, questions = prepare(server, tmp_path, count, ceiling), contents(count, server.base_url)
    left_open = kill_and_resume(
        server, arguments, [key for _, key, _ in questions.values()], kills=20, seed=0
    )
    last = run_to_the_end(arguments)
    assert last["actions"] == count and last["halted"] == "" and 0 < last["calls"] < count

    asked, billed = server.count("request"), server.count("billed")
    with Ledger(arguments[2]) as ledger:
        in_flight = Counter(request.key for request in ledger.open_requests)
        for content, key, _ in questions.values():
            assert ledger.known(key).action.text.startswith("echo: question")
            assert 1 <= asked[content] <= 1 + in_flight[key]  # once, and again only where a kill came between
            assert 1 <= billed[content] <= 1 + in_flight[key]
        # it grows by what was in flight at a kill, and falls where the next run reads an answer that had come
        steps = [b - a for a, b in zip([0, *left_open], [*left_open, in_flight.total()])]
        assert sum(left_open) > 0 and -PLACES <= min(steps) and max(steps) <= PLACES and steps[-1] <= 0
        arrived = asked.total() - len(asked)
        assert len(asked) == count and arrived <= in_flight.total()  # the rest was killed before it was sent
        cost = sum(billed[content] * usd for content, _, usd in questions.values())
        assert cost <= ledger.committed_usd + 1e-9 <= ceiling


def test_kills_under_a_tight_ceiling(server: Server, tmp_path: Path) -> None:
    count, asker = 300, teacher(server.base_url)
    worst = [asker.worst_case_usd(asker.request(state)) for state in states(count)]
    ceiling = sum(worst) / 8
    arguments, questions = prepare(server, tmp_path, count, ceiling), contents(count, server.base_url)
    kill_and_resume(server, arguments, [key for _, key, _ in questions.values()], kills=5, seed=1)
    last = run_to_the_end(arguments)
    assert last["halted"].startswith("budget") and 0 < last["actions"] < count
    billed = server.count("billed")
    cost = sum(billed[content] * usd for content, _, usd in questions.values())
    with Ledger(arguments[2]) as ledger:
        assert cost <= ledger.committed_usd + 1e-9 <= ceiling + 2e-9
        assert ceiling - ledger.committed_usd < max(worst)
    assert run_to_the_end(arguments)["calls"] == 0
    assert server.count("billed") == billed
