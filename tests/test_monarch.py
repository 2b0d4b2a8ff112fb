"""What Monarch's actors are made of, in this process: names that make rollouts countable, classes that refuse
what would be another step, and a pool that replaces what is lost. With Monarch itself it is tried in
`parity/test_monarch_adapter.py`.
"""

import asyncio
import importlib.metadata
from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.adapters import monarch_loop
from composer_nb.adapters.environments import ENVIRONMENTS, EnvironmentMissing
from composer_nb.adapters.monarch import (
    TESTED,
    Judged,
    Key,
    Rewarder,
    Sample,
    TeacherSeat,
    Verdict,
    actor_of,
    endpoints_of,
    pairs_of,
    require_monarch,
)
from composer_nb.adapters.monarch_loop import Controller, Incident, Plan, RolloutLedger, StepReport, goodput
from composer_nb.adapters.monarch_model import Generator, Trainer, batch_of
from composer_nb.drills.monarch_run import Copyist, InProcess, Letters
from composer_nb.loss.config import LossConfig
from composer_nb.tasks.rollouts import Sampling
from composer_nb.traces import TraceState

CONFIG = LossConfig(policy_kind="grpo", alpha_sdpo=0.5, beta_replay=0.3)
QUESTION = ({"role": "user", "content": "Write: red"},)


def load() -> tuple[torch.nn.Module, object]:
    return tiny.model(), tiny.tokenizer()


def sample(step: int = 0, prompt: int = 0, number: int = 0, version: int = 0) -> Sample:
    return Sample(Key(step, prompt, number), version, (1, 5, 6), (7 + number, 8), (-1.0, -2.0), "a1")


def judged(step: int = 0, version: int = 0, group: int = 4) -> list[Judged]:
    return [Judged(sample(step, 0, n, version), QUESTION, Verdict(n / 4)) for n in range(group)]


def plan(**more: object) -> Plan:
    own = {"sampling": Sampling(max_new_tokens=4, seed=0), "prompts": 2, "group": 2, "teachers": (Copyist,)}
    return Plan(load, Letters(), CONFIG, **own | {"lr": 1e-3} | more)


# -- names and counting


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 4)), max_size=30))
def test_a_rollout_counts_once_whatever_comes_again(arrivals: list[tuple[int, int]]) -> None:
    ledger = RolloutLedger([Key(3, 0, n) for n in range(4)], version=3)
    new = sum(ledger.take([sample(3, 0, number, version)]) for number, version in arrivals)
    current = {number for number, version in arrivals if version == 3}
    assert new == len(ledger.counted) == len(current)
    assert {key.sample for key in ledger.missing} == {0, 1, 2, 3} - current
    assert all(one.version == 3 for one in ledger.counted.values())
    assert new + sum(ledger.refused.values()) == len(arrivals)


def test_a_rollout_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(2, 0, 0\) was not asked for"):
        RolloutLedger([Key(3, 0, 0)], version=3).take([sample(2)])


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_the_batch_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    rows, tokenizer = judged(), tiny.tokenizer()
    one, other = (batch_of(given, [], tokenizer, 4) for given in (rows, [rows[i] for i in order]))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_would_count_twice_or_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 0, 3\) is here 2 times"):
        batch_of([*judged(), judged()[3]], [], tiny.tokenizer(), 4)
    with pytest.raises(ValueError, match="has 3 samples, and a group has 4"):
        batch_of(judged()[:3], [], tiny.tokenizer(), 4)


# -- the classes


def test_draws_follow_from_names_and_weights_alone() -> None:
    how, keys = Sampling(max_new_tokens=6, seed=0), [Key(2, 1, n) for n in range(3)]
    used, fresh = Generator(load, how), Generator(load, how)
    with pytest.raises(RuntimeError, match="no weights"):
        fresh.sample(keys, QUESTION)
    weights = dict(tiny.model(seed=1).named_parameters())
    for generator in (used, fresh):
        generator.take(5, weights)
    used.sample([Key(0, 0, 0)], QUESTION)
    torch.rand(7)
    assert used.sample(keys, QUESTION) == fresh.sample(keys, QUESTION)
    assert {one.version for one in fresh.sample(keys, QUESTION)} == {5}
    assert fresh.sample(keys, QUESTION) != fresh.sample([key._replace(step=3) for key in keys], QUESTION)
    with pytest.raises(ValueError, match="weights of another model"):
        fresh.take(6, {"head": torch.zeros(1)})
    with pytest.raises(ValueError, match="temperature=0.7"):
        Generator(load, Sampling(temperature=0.7))


def test_logprobs_are_those_of_the_weights_that_sampled() -> None:
    generator = Generator(load, Sampling(max_new_tokens=6, seed=0))
    generator.take(0, dict(tiny.model(seed=1).named_parameters()))
    for one in generator.sample([Key(0, 0, n) for n in range(3)], QUESTION):
        ids = torch.tensor([[*one.prompt_ids, *one.ids]])
        with torch.no_grad():
            logs = tiny.model(seed=1)(ids).logits.log_softmax(-1)[0]
        start = len(one.prompt_ids)
        own = [logs[start + i - 1, token].item() for i, token in enumerate(one.ids)]
        assert one.logprobs == pytest.approx(own, abs=1e-5)


def test_a_step_is_taken_once_in_order_and_with_its_own_rollouts() -> None:
    trainer = Trainer(load, CONFIG, group=4, lr=1e-3)
    with pytest.raises(ValueError, match="step 1 was asked for after 0 steps"):
        trainer.learn(1, judged(1, 1), [])
    taken = trainer.learn(0, judged(), [])
    assert taken.version == 1 and set(taken.dark) == {"sdpo", "replay"}  # named, no silent zero
    version, weights = trainer.weights()
    assert version == 1 and any(not torch.equal(weights[n], p) for n, p in tiny.model().named_parameters())
    wrong = ((0, judged(), "once"), (1, judged(1, 0), "version 0"), (1, judged(0, 1), "of step 0"))
    for step, rows, said in wrong:
        with pytest.raises(ValueError, match=said):
            trainer.learn(step, rows, [])
    assert trainer.version == 1 and all(torch.equal(weights[n], p) for n, p in trainer.weights()[1].items())


def test_the_judge_refuses_what_it_cannot_judge() -> None:
    judge = Rewarder(Letters(), count=2)
    wrong = Verdict(0.0, "Reminder: only letters and spaces.")
    assert judge.judge([0, 2], ["red red", "4"]) == [Verdict(1.0), wrong]
    with pytest.raises(ValueError, match="'letters' writes no hint 'plan', only error"):
        Rewarder(Letters(), count=2, hint="plan").judge([0], ["4"])
    with pytest.raises(ValueError, match="longer|shorter"):
        judge.judge([0, 1], ["a"])


def test_a_pair_needs_an_answer_that_the_judge_finds_better() -> None:
    row = Judged(sample(), QUESTION, Verdict(0.5))
    (text,) = asyncio.run(TeacherSeat(Copyist).answer([TraceState("s", QUESTION, "a1")]))
    same, better, none = ("a1", Verdict(0.5)), (text, Verdict(1.0)), ("", Verdict(1.0))
    assert pairs_of([row], [[same, none]]) == []
    (pair,) = pairs_of([row], [[same, better, better]])
    assert (pair.chosen, pair.rejected, pair.rejected_ids) == ("red", "a1", (7, 8))
    assert pair.n_teachers_agreeing == 2 and pair.state_id == "0/0/0"


# -- actors


def test_without_monarch_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for attempt in (require_monarch, partial(actor_of.__wrapped__, Rewarder)):
        with pytest.raises(EnvironmentMissing, match="composer-nb env make monarch"):
            attempt()


@pytest.mark.parametrize("version", ["0.6.0", "0.8.0", "1.0"])
def test_a_version_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(RuntimeError, match=rf"torchmonarch {version} was not tried.*0\.7\.\*"):
        require_monarch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.3")
    assert require_monarch() == "0.7.3"


def test_the_pins_are_of_a_version_that_was_tried() -> None:
    environment = ENVIRONMENTS["monarch"]
    lines = environment.pins.read_text().splitlines()
    (pinned,) = [line.partition("==")[2] for line in lines if line.startswith("torchmonarch==")]
    assert ".".join(pinned.split(".")[:2]) in TESTED
    assert all(name.startswith("HYPERACTOR_") for name, _ in environment.settings)


def test_endpoints_are_all_alike_and_have_names_of_their_own() -> None:
    assert set(endpoints_of(Trainer)) == {"weights", "learn", "pid"}
    assert set(endpoints_of(Controller)) == {"start", "pids", "failures", "weights", "step", "close"}
    mixed = type("Mixed", (), {"now": lambda self: 1, "later": TeacherSeat.pid})
    with pytest.raises(TypeError, match="later are async and now are not"):
        endpoints_of(mixed)
    with pytest.raises(TypeError, match="Stopping.stop"):
        endpoints_of(type("Stopping", (), {"stop": lambda self: None}))


# -- the loop


def test_steps_without_actors_learn_and_hand_weights_over() -> None:
    pool = InProcess(plan())
    reports = asyncio.run(pool.run(2))
    assert [report.taken.version for report in reports] == [1, 2] and pool.newest[0] == 2
    assert pool.actors["generator_0"].version == 2
    assert all(report.rollouts == 4 and report.incidents == () for report in reports)
    own = dict(pool.actors["trainer"].model.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in pool.actors["generator_0"].model.named_parameters())


def test_rollouts_that_do_not_come_end_the_step() -> None:
    pool = InProcess(plan())
    real = pool.ask

    async def ask(role: str, method: str, *arguments: object) -> object:
        found = await real(role, method, *arguments)
        return found[1:] if method == "sample" else found

    pool.ask = ask
    with pytest.raises(RuntimeError, match="2 rollouts of step 0 did not come"):
        asyncio.run(pool.run(1))


def report(wall: float, *lost: tuple[float, float]) -> StepReport:
    incidents = tuple(Incident(0, "generator_0", "sample", soon, "gone", after) for soon, after in lost)
    return StepReport(0, wall, 1, 1, 0.0, 0, SimpleNamespace(), {}, incidents)


def test_goodput_is_the_share_of_time_that_was_not_lost() -> None:
    assert goodput([report(5.0), report(5.0)]) == 1.0
    assert goodput([report(5.0), report(5.0, (1.0, 2.0), (1.0, 0.0))]) == pytest.approx(0.6)


class Gone(Exception):
    "An actor that is lost, as Monarch would say it."


def pool_of(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[object]], **more: object) -> object:
    "A pool whose seats answer from a list: a value, or an error that is raised. No process is started."
    monkeypatch.setattr(monarch_loop, "lost_errors", lambda: (Gone, TimeoutError))

    async def new(self: monarch_loop.Seats, role: str) -> monarch_loop.Seat:
        self.serial[role] += 1
        return monarch_loop.Seat(None, self.serial[role])

    monkeypatch.setattr(monarch_loop.Seats, "new", new)

    class Played(monarch_loop.ActorPool):
        async def call(self, role: str, method: str, *arguments: object) -> object:
            asked.append((role, self.actors[role].actor, method))
            said = answers[method].pop(0)
            if isinstance(said, Exception):
                raise said
            return said

    asked: list[tuple[str, int, str]] = []
    pool = Played(plan(**more), {})
    pool.asked = asked
    return pool


def test_a_new_generator_has_the_newest_weights_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(monkeypatch, {"sample": [Gone("x"), "rollouts"], "take": [None, None]})
    pool.newest = (4, {})
    assert asyncio.run(pool.ask("generator_0", "sample")) == "rollouts"
    assert [row[1:] for row in pool.asked] == [(1, "take"), (1, "sample"), (2, "take"), (2, "sample")]
    (incident,) = pool.incidents
    assert (incident.role, incident.method, incident.error) == ("generator_0", "sample", "x")
    assert incident.respawn_s > 0


def test_an_actor_that_is_lost_each_time_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(monkeypatch, {"judge": [Gone("y")] * 3}, restarts=2)
    with pytest.raises(RuntimeError, match="rewarder was lost 3 times in judge, step 0: y"):
        asyncio.run(pool.ask("rewarder", "judge"))


def test_an_error_of_a_method_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(monkeypatch, {"judge": [ValueError("of the method")]})
    with pytest.raises(ValueError, match="of the method"):
        asyncio.run(pool.ask("rewarder", "judge"))
    assert pool.incidents == []


def test_the_trainer_has_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(monkeypatch, {"learn": [Gone("z")]})
    with pytest.raises(RuntimeError, match=r"lost in learn, step 0 \(z\).*weights that were saved"):
        asyncio.run(pool.ask("trainer", "learn"))
    assert pool.seats.serial["trainer"] == 1
