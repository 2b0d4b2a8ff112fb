"""A job in verl: an answer is of one version of the weights; the checker's words become the hinted reading in
verl's own padding; what a step cannot be made of is refused.
"""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import tiny
import torch

from composer_nb.adapters.environments import make_environment, run_in
from composer_nb.adapters.verl import SETTINGS, as_tensordict
from composer_nb.adapters.verl_step import (
    answer_of,
    body_of,
    compute_score,
    hint_rows,
    question_of,
    take_weights,
)
from composer_nb.adapters.vllm_weights import Announced
from composer_nb.batch import ComposerDataCollator, Rollout
from composer_nb.hints.place import encode, render
from composer_nb.loss.config import LossConfig
from composer_nb.tasks.questions import reference_call, render_answer
from composer_nb.tasks.tool_calls import grade, hint_for

MESSAGES = [{"role": "user", "content": "Add 2 and 3."}]
HINT = "Answer with JSON."


class Turning(BaseHTTPRequestHandler):
    "A server whose weights change while it answers the first question, and that is away for the next `gone`."

    versions: ClassVar[list[str]]
    gone: ClassVar[int]
    bodies: ClassVar[list[dict[str, Any]]]
    refuses: ClassVar[str]

    def do_GET(self) -> None:
        if self.gone > 0:
            type(self).gone -= 1
            self.send_error(503)
            return
        self._say({"weight_version": self.versions.pop(0)} if self.path == "/weight_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.path == self.refuses:
            return self._say({"error": "refused"}, 500)
        number = len(self.bodies)
        self._say({"choices": [{"token_ids": [number], "logprobs": {"token_logprobs": [-float(number)]}}]})

    def _say(self, what: Any, status: int = 200) -> None:
        said = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        "Nothing."


@pytest.fixture
def turning() -> Iterator[tuple[Any, str]]:
    kind = type("One", (Turning,), {"versions": [], "gone": 0, "bodies": [], "refuses": ""})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield kind, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_answer_across_a_change_of_weights_is_asked_again(turning: Any) -> None:
    kind, url = turning
    kind.versions = ["one", "two", "loading-three", "three", "three"]
    choice, version = answer_of(url, {"prompt": [1]})
    assert (choice["token_ids"], version, len(kind.bodies)) == ([2], "three", 2)


def test_a_draw_has_a_seed_of_its_own_for_each_prompt_and_version(turning: Any) -> None:
    kind, url = turning
    kind.versions = ["one", "one"] * 3 + ["two", "two"]
    for draw in ((0, 1), (0, 1), (1, 0), (0, 1)):
        answer_of(url, {"prompt": [1]}, draw=draw)
    first, again, other, newer = (body["seed"] for body in kind.bodies)
    assert first == again and len({first, other, newer}) == 3


def test_a_server_that_comes_back_is_asked_again_and_one_that_stays_away_is_named(turning: Any) -> None:
    kind, url = turning
    kind.versions, kind.gone = ["one", "one"], 2
    assert answer_of(url, {"prompt": [1]}, wait_s=20)[1] == "one"
    kind.gone = 10**6
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:\d+ stayed away for 1\.0 s"):
        answer_of(url, {"prompt": [1]}, wait_s=1.0)
    assert time.monotonic() - began < 10


def test_a_server_that_never_keeps_a_version_is_named(turning: Any) -> None:
    kind, url = turning
    kind.versions = ["loading-one"] * 1000
    with pytest.raises(ConnectionError, match=r"no answer of one version of its weights in 0\.5 s"):
        answer_of(url, {"prompt": [1]}, wait_s=0.5)
    assert not kind.bodies


def test_new_weights_say_that_they_are_loading_and_a_refusal_puts_the_old_version_back(
    turning: Any, tmp_path: Path
) -> None:
    kind, url = turning
    (tmp_path / "weights-1.safetensors").write_bytes(b"")
    told = Announced("weights-2.safetensors", "2", 1)
    kind.versions = ["one"]
    take_weights(url, tmp_path, told, Announced("weights-1.safetensors", "1", 1))
    said = [body.get("new_version") or body.get("weight_version") for body in kind.bodies]
    assert [version for version in said if version] == ["loading-2", "2"]
    assert list(tmp_path.iterdir()) == []
    kind.versions, kind.bodies, kind.refuses = ["two"], [], "/update_weights"
    with pytest.raises(RuntimeError, match="update_weights: 500"):
        take_weights(url, tmp_path, told)
    assert [body["new_version"] for body in kind.bodies if "new_version" in body] == ["loading-2", "two"]


def test_the_body_says_all_that_verl_asked_for_and_refuses_another_distribution() -> None:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    plain = {"model": "composer", "prompt": [1, 2], "max_tokens": 7, "logprobs": 0, "return_token_ids": True}
    plain["temperature"] = 1.0
    assert body_of([1, 2], params, 7) == plain
    told = {"stop_token_ids": [5], "max_tokens": 3}
    assert body_of([1, 2], params | told, 7) == plain | told
    assert body_of([1, 2], params | {"max_new_tokens": 2}, 7)["max_tokens"] == 2
    assert body_of([1], params | {"temperature": 0, "top_k": 5}, 7)["temperature"] == 0
    with pytest.raises(ValueError, match="repetition_penalty=1.1 draws"):
        body_of([1], params | {"temperature": 0, "repetition_penalty": 1.1}, 7)
    for name, value in {"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "min_p": 0.1}.items():
        with pytest.raises(
            ValueError, match=rf"{name}={value} draws .* set actor_rollout_ref\.rollout\.{name}="
        ):
            body_of([1], params | {name: value}, 7)
    with pytest.raises(ValueError, match="ignore_eos=True is not passed on"):
        body_of([1], params | {"ignore_eos": True}, 7)


@pytest.mark.parametrize(
    ("text", "form", "score"),
    [
        ("{}", 0.0, 0.0), ("{}", 0.2, 0.2), ("no call", 0.2, 0.0), ("[]", 0.2, 0.0),
        ('{"a": 1} and more', 0.2, 0.2), ('{"a":' * 3000, 0.2, 0.0),
    ],
)  # fmt: skip
def test_a_form_earns_what_the_job_says(text: str, form: float, score: float) -> None:
    said = compute_score("tool_calls", text, "simple_python_1", {}, form=form)
    question = question_of("simple_python_1")
    graded = grade(text, question)
    assert said == {"score": score, "feedback": graded.feedback, "hint": hint_for(question, graded)}
    assert said["hint"]


def test_a_right_call_has_the_whole_score_and_no_hint() -> None:
    question = question_of("simple_python_1")
    said = compute_score("tool_calls", render_answer(reference_call(question)), question.id, form=0.2)
    assert said == {"score": 1.0, "feedback": "", "hint": ""}


def played(tokenizer: Any, answers: list[str], hints: list[str], width: int) -> SimpleNamespace:
    "verl's padding: prompts `width` wide on the left, answers on the right."
    prompt = encode(tokenizer, render(tokenizer, MESSAGES))
    ids = [encode(tokenizer, answer) for answer in answers]
    longest, fill = max(map(len, ids)), tokenizer.pad_token_id
    rows = [[fill] * (width - len(prompt)) + prompt + a + [fill] * (longest - len(a)) for a in ids]
    before, read = [0] * (width - len(prompt)), [1] * len(prompt)
    seen = [before + read + [1] * len(a) + [0] * (longest - len(a)) for a in ids]
    sampled = [[1] * len(a) + [0] * (longest - len(a)) for a in ids]
    names = ("input_ids", "attention_mask", "response_mask")
    tensors = {name: torch.tensor(value) for name, value in zip(names, (rows, seen, sampled))}
    beside = {"hint": hints, "raw_prompt": [MESSAGES] * len(rows)}
    return SimpleNamespace(batch=tensors, non_tensor_batch=beside)


def test_the_hinted_reading_is_that_of_our_own_collator() -> None:
    tokenizer = tiny.tokenizer()
    prompt = encode(tokenizer, render(tokenizer, MESSAGES))
    answers, hints = ["five", "it is 5, I think", "6"], [HINT, "", HINT]
    data = played(tokenizer, answers, hints, len(prompt) + 5)
    found = hint_rows(data, tokenizer)
    rollouts = []
    for answer, hint in zip(answers, hints):
        ids = encode(tokenizer, answer)
        sampled = [0] * len(prompt) + [1] * len(ids)
        rollouts.append(Rollout(prompt + ids, sampled, hint=hint, site_context=MESSAGES if hint else ()))
    own = ComposerDataCollator(tokenizer)(rollouts, [])
    compared = found["sdpo_loss_mask"].bool()
    assert torch.equal(compared, own["sdpo_loss_mask"].bool()) and not compared[1].any()
    for side, ids in (("student", "input_ids"), ("teacher", "ctx_teacher_input_ids")):
        mine = (data.batch if side == "student" else found)[ids]
        at, there = found[f"{side}_response_idx"], own[f"{side}_response_idx"]
        assert torch.equal(mine.gather(1, at)[compared], own[ids].gather(1, there)[compared])
    for row, hint in enumerate(hints):
        kept = found["ctx_teacher_input_ids"][row][found["ctx_teacher_attention_mask"][row].bool()]
        ours = own["ctx_teacher_input_ids"][row][own["ctx_teacher_attention_mask"][row].bool()]
        assert torch.equal(kept, ours) and bool(len(kept)) == bool(hint)


def test_nobody_with_a_hint_gives_no_rows_and_one_too_long_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    width = len(encode(tokenizer, render(tokenizer, MESSAGES)))
    assert hint_rows(played(tokenizer, ["5", "6"], ["", ""], width), tokenizer) == {}
    with pytest.raises(ValueError, match=r"\d+ tokens.*12"):
        hint_rows(played(tokenizer, ["5"], [HINT], width), tokenizer, longest=12)
    data = played(tokenizer, ["5"], [HINT], width)
    del data.non_tensor_batch["hint"]
    with pytest.raises(ValueError, match="without hint: compute_score is a reward function"):
        hint_rows(data, tokenizer)


def test_a_prompt_that_verl_cut_is_hinted_as_the_student_read_it() -> None:
    tokenizer = tiny.tokenizer()
    width = len(encode(tokenizer, render(tokenizer, MESSAGES)))
    whole = hint_rows(played(tokenizer, ["5"], [HINT], width), tokenizer)["ctx_teacher_input_ids"][0].tolist()
    data = played(tokenizer, ["5"], [HINT], width)
    data.batch = {name: value[:, -width:] for name, value in data.batch.items()}  # one token of the prompt
    assert hint_rows(data, tokenizer)["ctx_teacher_input_ids"][0].tolist() == whole[1:]
    data.batch = {name: value[:, -5:] for name, value in data.batch.items()}  # and where the hint belongs
    with pytest.raises(ValueError, match="the student's context ends in"):
        hint_rows(data, tokenizer)


STEPS = """
import asyncio, json, sys, numpy as np, torch
sys.path.insert(0, sys.argv[1])
import tiny
from tensordict import TensorDict
from verl.protocol import DataProto
from composer_nb.adapters.verl_step import ServedRollouts, advantages_of, step_of
from composer_nb.hints.place import encode, render
from composer_nb.policy import group_advantages

tokenizer, messages = tiny.tokenizer(), [{"role": "user", "content": "Add 2 and 3."}]
prompt, width = encode(tokenizer, render(tokenizer, messages)), 40
mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
scores = torch.tensor([1.0, 0.0, 0.2, 0.0])
last = torch.zeros(4, 3)
last[torch.arange(4), mask.sum(1) - 1] = scores
draw = torch.Generator().manual_seed(0)
left = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt]).expand(4, -1)
seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt)]).expand(4, -1)
tensors = {"input_ids": torch.cat([left, torch.randint(5, 99, (4, 3), generator=draw)], 1),
           "attention_mask": torch.cat([seen, mask], 1), "response_mask": mask,
           "rollout_log_probs": -torch.rand(4, 3, generator=draw), "rm_scores": last}
def column(values):
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
beside = {"uid": column(["a", "b", "a", "b"]), "hint": column(["Use JSON.", "", "Use JSON.", ""]),
          "weights": column(["1"] * 4), "greedy": column([False] * 4), "raw_prompt": column([messages] * 4)}
def made(more={}, there={}, without="", **options):
    given = {name: value for name, value in (tensors | more).items() if name != without}
    said = {name: value for name, value in (beside | there).items() if name != without}
    return step_of(DataProto(TensorDict(given, batch_size=4), said), tokenizer, **options)
batch = made(version="1")
sampled = batch["response_mask"].bool()
said = {"advantages": batch["advantages"][sampled].tolist(), "old": batch["old_logprobs"][sampled].tolist()}
ours = group_advantages(scores[[0, 2, 1, 3]], 2, eps=1e-6)[[0, 2, 1, 3]]
said["ours"] = ours[:, None].expand(4, 3)[mask.bool()].tolist()
said["given"] = tensors["rollout_log_probs"][mask.bool()].tolist()
same = batch["sdpo_loss_mask"].bool()
said["compared"] = same.sum(1).tolist()
said["same"] = torch.equal(batch["input_ids"].gather(1, batch["student_response_idx"])[same],
                           batch["ctx_teacher_input_ids"].gather(1, batch["teacher_response_idx"])[same])
given = made({"old_log_probs": -torch.ones(4, 3), "ref_log_prob": -2 * torch.ones(4, 3),
              "advantages": torch.full((4, 3), 7.0)})
kept = ("old_logprobs", "ref_logprobs", "advantages")
said["kept"] = [given[name][sampled].unique().tolist() for name in kept]
eight = {"response_mask": torch.ones(8, 1, dtype=torch.long), "rm_scores": torch.full((8, 1), 0.2)}
alike = DataProto(TensorDict(eight, batch_size=8), {"uid": column(["a"] * 8)})
said["alike"] = advantages_of(alike).abs().max().item()
said["refused"] = []
mixed = {"weights": column(["1", "1", "2", "1"])}
corrected = {"rollout_is_weights": torch.ones(4, 3)}
for wrong in ({"without": "uid"}, {"without": "rollout_log_probs"}, {"without": "rm_scores"},
              {"there": mixed},
              {"version": "2"}, {"without": "weights", "version": "2"},
              {"there": {"greedy": column([False, False, False, True])}},
              {"more": {"rm_scores": last * float("nan")}}, {"more": corrected}):
    try:
        made(**wrong)
    except ValueError as error:
        said["refused"].append(str(error))

async def asked(seed, **others):
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    client = ServedRollouts(sys.argv[2], 4, seed=seed)
    return await client.generate("r", prompt_ids=[1, 2], sampling_params=params, **others)
answer = asyncio.run(asked(0, priority=3, image_data=None))
said["answer"] = [answer.token_ids, answer.log_probs, answer.extra_fields]
for others in ({}, {"priority": 0, "image_data": [1]}):
    try:
        asyncio.run(asked(0, **others))
    except ValueError as error:
        said["refused"].append(str(error))
print(json.dumps(said))
"""


def test_a_step_in_the_process_of_verl(turning: Any) -> None:
    kind, url = turning
    kind.versions = ["one", "one"]
    words = ["-W", "ignore", "-c", STEPS, str(Path(__file__).parent), url]
    said = json.loads(run_in(make_environment("verl"), words, VERL_PLATFORM="cpu").stdout.splitlines()[-1])
    assert said["old"] == pytest.approx(said["given"])
    assert said["advantages"] == pytest.approx(said["ours"], rel=1e-4)
    assert said["compared"] == [3, 0, 1, 0] and said["same"]
    assert said["kept"] == [[-1.0], [-2.0], [7.0]] and said["alike"] == 0.0
    assert said["answer"] == [[1], [-1.0], {"weights": "one", "greedy": False}]
    expected = [
        "prompts.union(played)", "calculate_log_probs=true", "reward_loop_worker_handles",
        "weights 1 and 2: sample them with one version", "weights 1: sample them with version 2",
        "weights unknown: sample them with version 2", "greedy answers are for validation",
        "the score of answer 0 is nan", "rollout_is_weights is not applied", "set seed=None",
        "image_data was given",
    ]  # fmt: skip
    assert len(said["refused"]) == len(expected)
    assert [text for text, words in zip(said["refused"], expected) if words not in text] == []


def test_a_setting_that_verl_does_not_read_is_refused_and_those_that_pass_are_in_its_source() -> None:
    with pytest.raises(
        ValueError, match="no setting 'num_minibatch' of a batch: did you mean num_mini_batch"
    ):
        as_tensordict({}, LossConfig(), num_minibatch=1)
    workers = make_environment("verl").folder / "verl" / "workers"
    source = [path.read_text() for path in (*workers.glob("*.py"), *workers.glob("engine/**/*.py"))]
    assert [
        name for name in SETTINGS if not any(f'"{name}"' in text or f"{name}=" in text for text in source)
    ] == []
