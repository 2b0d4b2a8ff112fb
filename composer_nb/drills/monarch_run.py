"""Steps over Monarch's actors: `python -m composer_nb.drills.monarch_run JOB.json` in its environment.

The job names a model's folder (with its tokenizer), a folder for results, and runs; each has a name, a
`LossConfig`, steps, and kills: in which step, which role, and after how many seconds it gets SIGKILL (or
SIGSTOP). Each run leaves `NAME.json` and the last weights, `NAME.safetensors`.
"""

import asyncio
import json
import os
import shutil
import signal
import string
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from composer_nb.adapters.monarch import Judged, Key, Sample, Verdict, actor_of
from composer_nb.adapters.monarch_loop import Controller, Incident, Plan, StepReport, hand_over, take_step
from composer_nb.adapters.monarch_model import Taken, Trainer
from composer_nb.loss.config import LossConfig
from composer_nb.replay.local_teacher import LocalTeacher
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.tasks.contract import Fault, Outcome, Turn
from composer_nb.tasks.rollouts import Sampling
from composer_nb.traces import Action, DPOPair, TraceState

COLOURS = "red blue green amber violet white black brown".split()
LETTERS = {*string.ascii_letters, " "}


class LettersEpisode:
    "One request: the reward is the share of letters and spaces among the characters of the answer."

    def __init__(self, wanted: str) -> None:
        self.wanted, self._turn = wanted, None

    @property
    def done(self) -> bool:
        return self._turn is not None

    @property
    def share(self) -> float:
        said = self._turn.said if self._turn else ""
        return sum(c in LETTERS for c in said) / len(said) if said else 0.0

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Write: {self.wanted}"}]

    def step(self, text: str) -> Turn:
        wrong = sorted({c for c in text if c not in LETTERS})
        bad = bool(wrong) or not text
        fault = Fault("wrong_effect", f"{len(wrong)} characters are no letters") if bad else None
        self._turn = Turn(self.wanted, text, None, fault.text if fault else "", fault)
        return self._turn

    def outcome(self) -> Outcome:
        return Outcome(self.share == 1.0, {"letters": self.share}, (self._turn,) if self._turn else ())


@dataclass(frozen=True)
class Letters:
    "Requests on which a model that knows nothing earns something."

    name: str = "letters"

    def tasks(self, split: str, count: int, seed: int = 0) -> list[str]:
        return [f"{COLOURS[(seed + i) % 8]} {COLOURS[(seed + i // 8) % 8]}" for i in range(count)]

    def episode(self, task: str) -> LettersEpisode:
        return LettersEpisode(task)

    def reference(self, task: str) -> list[str]:
        return [task]

    def secrets(self, task: str) -> list[list[str]]:
        return [[task]]

    def tools(self, task: str) -> list[dict[str, Any]]:
        return []

    def hints(self, turn: Turn) -> dict[str, str]:
        return {"error": "Reminder: only letters and spaces."} if turn.fault else {}


class Copyist:
    "A teacher that writes what is asked for."

    name = model = "copyist"

    def request(self, state: TraceState) -> TeacherRequest:
        return TeacherRequest(self.name, self.model, tuple(state.messages))

    def worst_case_usd(self, request: TeacherRequest) -> float:
        return 0.0

    async def reply(self, request: TeacherRequest) -> TeacherReply:
        wanted = request.messages[-1]["content"].removeprefix("Write: ")
        return TeacherReply(request.key, self.name, Action(wanted))

    async def aclose(self) -> None:
        return None


WORDS = 4096  # of the bundled model's 49,152: a softmax over all of them is most of a small model's work


def few_words(folder: Path) -> None:
    "The bundled model's tokenizer with its first ids alone, and its chat template."
    from composer_nb.models import prepare_smollm2

    whole = prepare_smollm2()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(whole / name, folder)
    content = json.loads((whole / "tokenizer.json").read_text(encoding="utf-8"))
    known, merges = content["model"]["vocab"], content["model"]["merges"]
    content["model"]["merges"] = merges[: len(merges) - (len(known) - WORDS)]  # each merge makes the next id
    content["model"]["vocab"] = {word: i for word, i in known.items() if i < WORDS}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def small_model(folder: Path) -> None:
    "A random Llama of two layers with a small tokenizer; a hint moves what it says."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=True, **small)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(32.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    few_words(folder)


def loaded(folder: str) -> tuple[Any, Any]:
    "Model and tokenizer of a folder."
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def small_teacher(folder: str) -> LocalTeacher:
    model, tokenizer = loaded(folder)
    return LocalTeacher(model, tokenizer, name="small", max_tokens=8)


def plan_of(job: Mapping[str, Any], run: Mapping[str, Any]) -> Plan:
    return Plan(
        load=partial(loaded, job["model"]), family=Letters(), config=LossConfig(**run["config"]),
        teachers=(Copyist, *([partial(small_teacher, job["model"])] if run.get("two_teachers") else ())),
        sampling=Sampling(max_new_tokens=run.get("tokens", 12), seed=0), **run.get("plan", {}),
    )  # fmt: skip


class InProcess:
    "The same classes without actors: a pool that calls them in this process."

    def __init__(self, plan: Plan) -> None:
        self.plan, self.step, self.incidents, self.newest = plan, 0, [], None
        self.actors = {role: made(*arguments) for role, (made, arguments) in plan.roles.items()}

    async def ask(self, role: str, method: str, *arguments: Any) -> Any:
        found = getattr(self.actors[role], method)(*arguments)
        return await found if asyncio.iscoroutine(found) else found

    async def run(self, steps: int) -> list[StepReport]:
        await hand_over(self)
        return [await take_step(self, number) for number in range(steps)]


def killed_after(pid: int, seconds: float, how: int, at: list[float]) -> threading.Thread:
    "Sends the signal from a thread, and notes when."

    def kill() -> None:
        time.sleep(seconds)
        os.kill(pid, how)
        at.append(time.time())

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def watched(folder: str) -> type[Trainer]:
    "A trainer that also leaves what it learnt from, and its gradient, in a folder."

    class Watched(Trainer):
        def learn(self, step: int, judged: Sequence[Any], pairs: Sequence[Any]) -> Any:
            taken = super().learn(step, judged, pairs)
            here = Path(folder)
            gradient = {name: p.grad for name, p in self.model.named_parameters()}
            save_file(gradient, here / f"gradient-{step}.safetensors")
            rows = {"judged": [asdict(row) for row in judged], "pairs": [asdict(pair) for pair in pairs]}
            (here / f"rollouts-{step}.json").write_text(json.dumps(rows), encoding="utf-8")
            return taken

    return Watched


def read_rollouts(path: Path) -> tuple[list[Judged], list[DPOPair]]:
    "What a watched trainer learnt from."
    rows = json.loads(path.read_text(encoding="utf-8"))
    judged = []
    for row in rows["judged"]:
        sample = row["sample"] | {"key": Key(*row["sample"]["key"])}
        judged.append(Judged(Sample(**sample), row["messages"], Verdict(*row["verdict"])))
    return judged, [DPOPair(**pair) for pair in rows["pairs"]]


def read_reports(path: Path) -> list[StepReport]:
    "The reports of a run."
    found = []
    for row in json.loads(path.read_text(encoding="utf-8"))["reports"]:
        incidents = tuple(Incident(**incident) for incident in row["incidents"])
        taken = Taken(**row["taken"] | {"dark": tuple(row["taken"]["dark"])})
        found.append(StepReport(**row | {"taken": taken, "incidents": incidents}))
    return found


async def steps(job: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    "The reports of a run's steps, or the error that ended it; when which actor was killed."
    from monarch.actor import ActorError, this_proc

    out, told, kills = Path(job["out"]), {"reports": [], "kills": []}, run.get("kills", [])
    plan = plan_of(job, run)
    if run.get("watched"):
        (out / run["name"]).mkdir()
        plan = replace(plan, trainer=watched(str(out / run["name"])))
    controller = this_proc().spawn(run["name"], actor_of(Controller), plan)
    began, seen = time.time(), set[int]()
    try:
        seen |= {*(await controller.start.call_one()).values()}
        told |= {"start_s": time.time() - began, "began": time.time()}
        for number in range(run["steps"]):
            threads = []
            for step, role, seconds, how in kills:
                if step == number:
                    pids = await controller.pids.call_one()
                    seen |= {*pids.values()}
                    threads.append(killed_after(pids[role], seconds, getattr(signal, how), told["kills"]))
            report = await controller.step.call_one(number)
            told["reports"].append(asdict(report))
            for thread in threads:
                thread.join()
        version, weights = await controller.weights.call_one()
        save_file(weights, out / f"{run['name']}.safetensors")
        told |= {"version": version}
    except ActorError as error:
        told["error"] = str(error)
    told["failures"] = await controller.failures.call_one()
    told["pids"] = sorted(seen)
    await controller.close.call_one()
    return told


async def learn_again(job: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    "One step of a trainer for each of the run's cases, on the rollouts that another run's trainer left."
    from monarch.actor import this_host

    out, told = Path(job["out"]), {}
    judged, pairs = read_rollouts(out / run["rollouts"])
    procs = this_host().spawn_procs(per_host={"procs": 1}, name=run["name"])
    for name, config in run["cases"].items():
        (out / name).mkdir()
        plan = plan_of(job, {"config": config} | run)
        made = actor_of(watched(str(out / name)))
        trainer = procs.spawn(name, made, plan.load, LossConfig(**config), plan.group, plan.lr)
        await trainer.pid.call_one()  # it is up, with its model
        began = time.perf_counter()
        told[name] = asdict(await trainer.learn.call_one(0, judged, pairs))
        told[name]["seconds"] = time.perf_counter() - began
    await procs.stop("done")
    return told


def main(path: str) -> None:
    from monarch.actor import shutdown_context

    job = json.loads(Path(path).read_text(encoding="utf-8"))
    for run in job["runs"]:
        told = asyncio.run((learn_again if "cases" in run else steps)(job, run))
        (Path(job["out"]) / f"{run['name']}.json").write_text(json.dumps(told), encoding="utf-8")
    shutdown_context().get()


if __name__ == "__main__":
    main(sys.argv[1])
