"""Monarch's actors with our classes in them: the trainer's loss and gradient against `compose_loss` on the
same rollouts, and a loop that loses actors of every role, whose steps stay those of an undisturbed process.

It runs in the environment of Monarch, in processes of its own; where that cannot be made the tests fail and
say why.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_nb.adapters.environments import make_environment, run_in
from composer_nb.adapters.monarch_loop import goodput
from composer_nb.batch import ComposerDataCollator, Rollout
from composer_nb.drills.monarch_run import InProcess, loaded, plan_of, read_reports, read_rollouts
from composer_nb.loss.channels import reference_logprobs
from composer_nb.loss.compose import compose_loss
from composer_nb.loss.config import LossConfig
from composer_nb.policy import group_advantages

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny  # noqa: E402

LOSS, GRADIENT = 1e-6, 1e-5  # relative, in fp32
LIMIT_S = 540  # a run takes a minute alone; its dozen processes share two cores with other tests
PATIENCE = 8.0  # seconds; a step of these actors takes about one, on a busy machine several
CASES: dict[str, dict[str, object]] = {
    "all": {"policy_kind": "dapo", "epsilon_high": 0.28, "alpha_sdpo": 0.5, "beta_replay": 0.3},
    "sequences": {
        "policy_kind": "grpo", "alpha_sdpo": 0.7, "sdpo_jsd_beta": 1.0, "sdpo_top_k": 20, "sdpo_is_cap": 2.0,
        "sdpo_reduction": "seq-mean-token-mean", "beta_replay": 0.5, "dpo_variant": "simpo",
    },
    "off": {"policy_kind": "grpo"},
}  # fmt: skip
LOST = {
    "name": "lost", "steps": 7, "watched": True, "two_teachers": True, "config": CASES["all"],
    "plan": {"patience": PATIENCE, "lr": 1e-3},
    "kills": [
        [1, "generator_0", 0.05, "SIGKILL"], [2, "rewarder", 0.0, "SIGKILL"],
        [3, "teacher_1", 0.0, "SIGKILL"], [4, "generator_0", 0.02, "SIGSTOP"], [6, "trainer", 0.0, "SIGKILL"],
    ],
}  # fmt: skip
SPARED = {
    "name": "spared", "steps": 4, "config": CASES["all"], "plan": {"generators": 2, "spares": 1, "lr": 1e-3},
    "kills": [[1, "generator_1", 0.02, "SIGKILL"], [2, "generator_0", 0.0, "SIGKILL"]],
}  # fmt: skip
PARITY = {"name": "parity", "rollouts": "lost/rollouts-0.json", "cases": CASES}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("monarch")
    model = tiny.model()
    with torch.no_grad():
        for weight in model.parameters():  # else a random model says the same with a hint as without
            weight.mul_(32.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(place / "model")
    tiny.tokenizer().save_pretrained(place / "model")
    return place


def job_in(place: Path) -> dict[str, Any]:
    return {"model": str(place / "model"), "out": str(place)}


def made(place: Path, run: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What a run told, made in a process of its own: a minute or two, most of it for starting actors. A test
    has ten minutes, so each run is a fixture, and the tests stand in an order in which none waits for two.
    """
    path = place / f"{run['name']}.job.json"
    path.write_text(json.dumps(job_in(place) | {"runs": [run]}))
    words = ["-W", "ignore", "-m", "composer_nb.drills.monarch_run", str(path)]
    run_in(make_environment("monarch"), words, timeout=limit_s, OMP_NUM_THREADS="1")
    return json.loads((place / f"{run['name']}.json").read_text())


@pytest.fixture(scope="module")
def lost(place: Path) -> dict[str, Any]:
    return made(place, LOST, LIMIT_S)


@pytest.fixture(scope="module")
def spared(place: Path) -> dict[str, Any]:
    return made(place, SPARED, LIMIT_S)


@pytest.fixture(scope="module")
def parity(place: Path, lost: dict[str, Any]) -> dict[str, Any]:
    "On the rollouts that the first step of `lost` left."
    return made(place, PARITY, LIMIT_S)


def undisturbed(place: Path, run: dict[str, object], steps: int) -> InProcess:
    "The same steps by the same classes in this process, without actors; `reports` are theirs."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the actors: sums in another order differ in their last bits
    try:
        pool = InProcess(plan_of(job_in(place), run))
        pool.reports = asyncio.run(pool.run(steps))
    finally:
        torch.set_num_threads(threads)
    return pool


def test_the_steps_with_lost_actors_are_those_of_an_undisturbed_process(
    place: Path, lost: dict[str, Any]
) -> None:
    reports = read_reports(place / "lost.json")
    own = undisturbed(place, LOST, 6).reports
    assert [report.taken for report in reports] == [report.taken for report in own]  # to the bit
    assert all(report.rollouts == 16 and not report.refused for report in reports)
    for step in range(6):
        judged, _ = read_rollouts(place / "lost" / f"rollouts-{step}.json")
        assert len({row.sample.key for row in judged}) == len(judged) == 16
        assert {row.sample.version for row in judged} == {step}  # the newest weights, also after a respawn


def test_each_loss_is_noticed_and_named(place: Path, lost: dict[str, Any]) -> None:
    reports = read_reports(place / "lost.json")
    incidents = [(i.step, i.role, i.method) for report in reports for i in report.incidents]
    assert [row[:2] for row in incidents] == [
        (1, "generator_0"), (2, "rewarder"), (3, "teacher_1"), (4, "generator_0")
    ]  # fmt: skip
    said = [i.error for report in reports for i in report.incidents]
    # The last of them on a busy machine.
    noticed = ("Killed(sig=9)", "likely crashed", f"no answer in {PATIENCE:g} s")
    assert all(any(word in one for word in noticed) for one in said[:3]), said
    assert any(word in said[3] for word in noticed[1:])  # our patience ends, or Monarch's
    meshes = {mesh.rpartition("-")[0] for mesh in lost["failures"]}
    # Told to `__supervise__`; of the trainer that is last, the loop may have ended before.
    assert {"generator_0_1", "rewarder_1", "teacher_1_1"} <= meshes
    assert 0.0 < goodput(reports) < 1.0


def test_a_lost_trainer_ends_the_step_with_the_remedy(lost: dict[str, Any]) -> None:
    assert len(lost["reports"]) == 6 and "step 6" in lost["error"]
    assert "the trainer was lost in" in lost["error"] and "weights that were saved" in lost["error"]


def test_two_generators_and_a_spare_take_the_same_steps(place: Path, spared: dict[str, Any]) -> None:
    own, theirs = undisturbed(place, SPARED, 4), load_file(place / "spared.safetensors")
    assert all(torch.equal(theirs[name], value) for name, value in own.newest[1].items())
    reports = read_reports(place / "spared.json")
    roles = {i.role for report in reports for i in report.incidents}
    assert roles == {"generator_0", "generator_1"} and all(report.rollouts == 16 for report in reports)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_compose_loss(place: Path, parity: dict[str, Any], name: str) -> None:
    told = parity[name]
    judged, pairs = read_rollouts(place / PARITY["rollouts"])
    model, tokenizer = loaded(job_in(place)["model"])
    rows = []
    for row in judged:
        prompt, ids = row.sample.prompt_ids, row.sample.ids
        scored = [0] * len(prompt) + [1] * len(ids)
        rows.append(Rollout([*prompt, *ids], scored, hint=row.verdict.hint, site_context=row.messages))
    batch = ComposerDataCollator(tokenizer)(rows, pairs)
    batch |= reference_logprobs(model, batch)
    batch["advantages"] = group_advantages(torch.tensor([row.verdict.reward for row in judged]), 4)
    old = torch.zeros(batch["input_ids"].shape)
    for at, row in enumerate(judged):
        start = len(row.sample.prompt_ids)
        old[at, start : start + len(row.sample.ids)] = torch.tensor(row.sample.logprobs)
    parts = compose_loss(model, batch | {"old_logprobs": old}, LossConfig(**CASES[name]))
    parts.total.backward()
    theirs = load_file(place / name / "gradient-0.safetensors")
    assert abs(told["loss"] - parts.total.item()) <= LOSS * abs(parts.total.item())
    assert set(told["channels"]) == set(parts.lit) and not told["dark"]
    for parameter, p in model.named_parameters():
        apart, size = (theirs[parameter] - p.grad).norm(), p.grad.norm()
        assert apart <= GRADIENT * size and size > 0, parameter


def test_all_three_channels_have_something_to_compare(place: Path, parity: dict[str, Any]) -> None:
    told = parity["all"]
    assert set(told["channels"]) == {"policy", "sdpo", "replay"} and all(told["scored"].values())
    assert abs(told["channels"]["sdpo"]) > 0.01 and abs(told["channels"]["replay"]) > 0.01
    judged, _ = read_rollouts(place / PARITY["rollouts"])
    assert len({row.verdict.reward for row in judged}) > 1  # else channel 1 would be zero on both sides


def test_nothing_is_left_behind(lost: dict[str, Any], spared: dict[str, Any]) -> None:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    pids = [*lost["pids"], *spared["pids"]]
    assert len(pids) >= 12 and os.getpid() not in pids and not [pid for pid in pids if alive(pid)]
