"""vLLM: a top-k teacher is exact on what it reads; a worker refuses before it touches anything; a server
that was killed is given its weights again; one that cannot start says why.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer_nb.adapters.environments import make_environment, run_in
from composer_nb.adapters.vllm_client import SamplingClient, check_logprobs, weights_through
from composer_nb.adapters.vllm_server import ServerDied, serve
from composer_nb.adapters.vllm_teacher import Served, _read, teacher_logits
from composer_nb.adapters.vllm_weights import Announced, FolderWeights, leave_weights, read_weights
from composer_nb.drills.vllm_train import small_letters
from composer_nb.loss.channels import distillation_channel
from composer_nb.loss.config import HintOptions
from composer_nb.training.hinting import refuse_server, room_at_server
from composer_nb.training.verified import served_at


def asking(k: int) -> HintOptions:
    return HintOptions(alpha_sdpo=1.0, sdpo_top_k=k, sdpo_top_k_source="teacher")


def named_by(logits: torch.Tensor, k: int) -> Served:
    "What a server with these logits would name."
    top = logits.log_softmax(-1).topk(k, -1)
    return Served(top.values, top.indices, top.values[:, 0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), k=st.integers(1, 12), spread=st.sampled_from([0.01, 1.0, 6.0, 30.0]),
    beta=st.sampled_from([0.0, 0.5, 1.0]), tail=st.booleans(), heat=st.sampled_from([0.5, 1.0, 2.0]),
)  # fmt: skip
def test_served_entries_give_the_loss_and_gradient_of_all_logits(
    seed: int, k: int, spread: float, beta: float, tail: bool, heat: float
) -> None:
    draws = torch.Generator().manual_seed(seed)
    teacher = (torch.randn(5, 12, generator=draws) * spread).double()
    student = torch.randn(5, 12, generator=draws).double()
    options = HintOptions(
        alpha_sdpo=1.0, sdpo_jsd_beta=beta, sdpo_top_k=k, sdpo_top_k_source="teacher", sdpo_tail=tail,
        sdpo_temperature=heat,
    )  # fmt: skip
    if tail and heat != 1.0:
        with pytest.raises(ValueError, match="temperature 1"):
            teacher_logits(named_by(teacher, k), 12, options)
        return
    found = []
    for logits in (teacher, teacher_logits(named_by(teacher, k), 12, options)):
        s = student.clone().requires_grad_()
        loss = distillation_channel(s, logits, torch.zeros(5, dtype=torch.long), options)
        loss.backward()
        found.append((loss.detach(), s.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), k=st.integers(1, 12), spread=st.sampled_from([0.0, 1.0, 50.0]))
def test_its_k_likeliest_are_the_servers(seed: int, k: int, spread: float) -> None:
    teacher = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) * spread
    served = named_by(teacher, k)
    again = teacher_logits(served, 12, asking(k)).topk(k, -1)
    assert (again.indices.sort(-1).values == served.ids.sort(-1).values).all()
    torch.testing.assert_close(again.values.sort(-1).values, served.logprobs.sort(-1).values)


def test_an_empty_answer_has_no_rows() -> None:
    empty = Served(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.long), torch.zeros(0))
    assert teacher_logits(empty, 7, asking(3)).shape == (0, 7)


@pytest.mark.parametrize(
    "more",
    [
        {"sdpo_top_k": None, "sdpo_top_k_source": "student"}, {"sdpo_top_k": 5}, {"sdpo_top_k": 2},
        {"sdpo_top_k_source": "student"}, {"sdpo_gate": 5.0}, {"sdpo_temperature": 0.5},
    ],
)  # fmt: skip
def test_what_reads_more_of_the_teacher_is_refused(more: dict[str, Any]) -> None:
    served = named_by(torch.randn(2, 12), 3)
    with pytest.raises(ValueError, match=r"served|all entries|temperature"):
        teacher_logits(served, 12, HintOptions(**vars(asking(3)) | more))


def entry(value: float | None, rank: int) -> dict[str, Any]:
    return {"logprob": value, "rank": rank}


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ([None, {"5": entry(-1.0, 1)}], "2 places scored of 3"),
        (None, "0 places scored of 3"),
        ([None, {"5": entry(-1.0, 1)}, {"9": entry(-1.0, 1)}], "without its own token 6"),
        ([None, {"5": entry(-1.0, 1)}, {"6": entry(float("nan"), 1)}], "usable entries"),
        ([None, {"5": entry(None, 1)}, {"6": entry(-1.0, 1)}], "usable entries"),
    ],
)
def test_a_reply_that_lacks_something_is_an_error(said: Any, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        _read(said, [4, 5, 6], 1, 1)


def test_the_given_token_counts_only_where_it_is_likely() -> None:
    place = {"6": entry(-9.0, 40), "1": entry(-0.5, 1), "2": entry(-1.5, 2)}
    served = _read([None, place], [4, 6], 1, 2)
    assert served.ids.tolist() == [[1, 2]] and served.given.tolist() == [-9.0]


class Counted(FolderWeights):
    "The worker's half, with what it would do to a model counted."

    def __init__(self) -> None:
        self.model, self.taken = nn.Linear(2, 2), 0

    def receive_weights(self, update_info: Any) -> None:
        self.taken += 1


@pytest.mark.parametrize("odd", ["missing", "renamed", "short", "elsewhere", "torn"])
def test_a_worker_refuses_before_anything_is_touched(odd: str, tmp_path: Path) -> None:
    worker = Counted()
    worker.init_transfer_engine(worker.parse_init_info({"folder": str(tmp_path)}))
    told = leave_weights(tmp_path, worker.model.named_parameters(), "a-1")
    worker.update_weights(vars(told))
    assert worker.taken == 1
    if odd == "missing":
        (tmp_path / told.file).unlink()
    if odd == "renamed":
        (tmp_path / told.file).rename(tmp_path / "weights-a-2.safetensors")
        told = Announced("weights-a-2.safetensors", "a-2", 2)
    if odd == "short":
        leave_weights(tmp_path, list(worker.model.named_parameters())[:1], "a-1")
    if odd == "elsewhere":
        told = Announced(f"../{tmp_path.name}/{told.file}", "a-1", 2)
    if odd == "torn":
        (tmp_path / told.file).write_bytes((tmp_path / told.file).read_bytes()[:-9])
    worker.start_weight_update()
    with pytest.raises(ValueError, match=r"is not there|holds|is no name|is no whole file of tensors"):
        worker.update_weights(vars(told))
    worker.finish_weight_update()
    assert worker.taken == 1


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def breaks() -> Any:
        yield "weight", torch.zeros(2)
        raise OSError("the trainer's disk")

    with pytest.raises(OSError, match="disk"):
        leave_weights(tmp_path, breaks(), "a-1")
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        leave_weights(tmp_path, [], "../a")
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_copied_before_the_next_is_asked_for(tmp_path: Path) -> None:
    held = torch.ones(3)

    def merged() -> Any:  # as TRL hands out weights with an adapter in them
        yield "weight", held.data
        held.zero_()

    told = leave_weights(tmp_path, merged(), "x")
    assert dict(read_weights(tmp_path, told))["weight"].tolist() == [1.0, 1.0, 1.0]


def test_a_worker_whose_model_is_half_loaded_takes_no_more(tmp_path: Path) -> None:
    worker = Counted()
    worker.broken = "ValueError: no such layer"
    with pytest.raises(RuntimeError, match="restart this server"):
        worker.start_weight_update()


def test_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    held = {"a": torch.randn(3, 2).T, "b": torch.randn(4).bfloat16(), "c": torch.zeros(0)}
    told = leave_weights(tmp_path, held.items(), "x")
    again = dict(read_weights(tmp_path, told))
    assert again.keys() == held.keys() and all(torch.equal(again[n], held[n]) for n in held)
    assert again["b"].dtype == torch.bfloat16


def test_log_probs_may_be_left_out_for_empty_answers() -> None:
    check_logprobs({"completion_ids": [[]], "logprobs": [[]]})


class Fickle(BaseHTTPRequestHandler):
    "A server of two lives: it drops a request while it samples, and comes back with its first weights."

    version, dropped, asked, open_update, always = "default", False, [], False, False
    release = "0.32.7"

    def log_message(self, *_: Any) -> None: ...

    def say(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        kind = type(self)
        answers = {"/weight_info": {"weight_version": kind.version}, "/v1/models": {"data": [{"id": "m"}]}}
        answers["/version"] = {"version": kind.release}
        answers["/server_info"] = {"vllm_config": {"weight_transfer_config": {"backend": "composer_folder"}}}
        self.say(answers.get(self.path.partition("?")[0], {}))

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        kind.asked.append(self.path)
        if self.path == "/start_weight_update":
            if kind.open_update:
                kind.open_update = False
                return self.say({"error": "a weight update is already active"}, 500)
        if self.path == "/finish_weight_update":
            kind.version = body.get("weight_version") or kind.version
        if self.path == "/v1/completions" and (kind.always or not kind.dropped):
            kind.dropped, kind.version = True, "default"
            return self.connection.close()
        said = {"prompt_token_ids": [1], "token_ids": [5], "logprobs": None, "text": kind.version}
        self.say({"choices": [said], "success": True})


@pytest.fixture
def fickle() -> Any:
    kind = type("One", (Fickle,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield kind, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def client_at(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> SamplingClient:
    monkeypatch.setattr("trl.generation.vllm_client.is_vllm_available", lambda: True)
    client = SamplingClient(folder, base_url=url, **options)
    client.init_communicator()
    return client


def test_a_server_that_dies_while_it_samples_is_given_its_weights_first(
    fickle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = fickle
    kind.open_update = True  # somebody began an update and is gone
    client = client_at(url, tmp_path, monkeypatch)
    client.update_model_params(nn.Linear(2, 2))
    own = client.told.version
    assert kind.version == own and kind.asked.count("/finish_weight_update") == 2
    with pytest.warns(UserWarning, match="has weights default"):
        answer = client._newest(lambda: client._post(f"{url}/v1/completions", json={}), (), {})
    assert answer["choices"][0]["text"] == own and client.again == 1
    assert [p.name for p in tmp_path.iterdir()] == [f"weights-{own}.safetensors"]
    client.close_communicator()
    assert list(tmp_path.iterdir()) == []


def test_a_vllm_that_was_not_tried_is_refused(
    fickle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = fickle
    kind.release = "0.33.0"
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0 was not tried"):
        client_at(url, tmp_path, monkeypatch)


def test_a_question_that_ends_the_server_each_time_is_not_asked_for_ever(
    fickle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = fickle
    kind.always = True
    client = client_at(url, tmp_path, monkeypatch, wait_s=1.0)
    client.update_model_params(nn.Linear(2, 2))
    with pytest.warns(UserWarning), pytest.raises(ConnectionError, match="stayed away"):
        client._newest(lambda: client._post(f"{url}/v1/completions", json={}), (), {})
    assert 2 <= kind.asked.count("/v1/completions") < 40


WATCHED = """
import subprocess, sys, time
from composer_nb.adapters.vllm_server import _watch
sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
watcher = _watch(sleeper.pid)
print(sleeper.pid, flush=True)
if sys.argv[1] == "ends":
    watcher.communicate(b"done\\n")
    time.sleep(0.3)
    print(sleeper.poll(), flush=True)
    sleeper.kill()
time.sleep(60)
"""


def gone(pid: int) -> bool:
    "Whether the process is over, or a zombie that nobody waits for."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_ends_with_who_started_it_however_that_ends() -> None:
    words = [sys.executable, "-c", WATCHED]
    with subprocess.Popen([*words, "dies"], stdout=subprocess.PIPE, text=True) as owner:
        sleeper = int(owner.stdout.readline())
        assert not gone(sleeper)
        owner.kill()
    until = time.monotonic() + 10
    while not gone(sleeper) and time.monotonic() < until:
        time.sleep(0.05)
    assert gone(sleeper)
    with subprocess.Popen([*words, "ends"], stdout=subprocess.PIPE, text=True) as owner:
        owner.stdout.readline()
        assert owner.stdout.readline() == "None\n"  # told that all is done, the watcher leaves it alone
        owner.kill()


def test_a_server_that_stays_away_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("One", (Fickle,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = client_at(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch, wait_s=1.0)
        server.shutdown()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"stayed away for 1\.0 s"):
        client.update_model_params(nn.Linear(2, 2))
    assert 1.0 <= time.monotonic() - began < 20.0
    with pytest.raises(ValueError, match="scores given texts at 1"):
        client.get_sequence_logprobs([[1, 2]], [1], temperature=0.5)


def test_a_block_without_a_trainer_that_asks_a_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no trainer in this block"), weights_through(tmp_path):
        pass


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match="listens on port"), serve("model", folder=tmp_path, port=port):
            raise AssertionError("it started")


def test_the_engine_has_all_that_vllm_asks_of_one() -> None:
    code = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
from vllm.plugins import load_general_plugins
load_general_plugins(); load_general_plugins()
from composer_nb.adapters.vllm_weights import register
register()
made = Factory._registry["composer_folder"]()
print("abstract:", sorted(made.__abstractmethods__))
"""
    said = run_in(make_environment("vllm"), ["-W", "ignore", "-c", code]).stdout
    assert "abstract: []" in said


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "nobody-knows"}))
    with pytest.raises(ServerDied, match="nobody-knows"), serve(str(tmp_path / "model"), folder=tmp_path):
        raise AssertionError("it started")


def test_a_server_that_was_killed_is_given_its_weights_again(tmp_path: Path) -> None:
    words = ["-W", "ignore", "-m", "composer_nb.drills.vllm_kill", str(tmp_path)]
    run_in(make_environment("vllm"), words, OMP_NUM_THREADS="1")
    told = SimpleNamespace(**json.loads((tmp_path / "kill.json").read_text()))
    assert told.moved > 0.05 and max(told.began, told.sent, told.back, told.sampled) < 1e-4
    assert (told.again, told.heard, told.answers, told.version) == (1, 1, 4, True)


def test_failed_turns_are_taken_again_at_the_server(tmp_path: Path) -> None:
    """Greedy, the server's re-takes are those of the trainer's own model at that step, token by token."""
    small_letters(tmp_path / "model")
    with serve(str(tmp_path / "model"), folder=tmp_path, threads=1, length=128) as server:
        (tmp_path / "url").write_text(server.url)
        words = ["-W", "ignore", "-m", "composer_nb.drills.vllm_train", str(tmp_path), "retakes"]
        run_in(make_environment("vllm"), words, OMP_NUM_THREADS="1")
    told = json.loads((tmp_path / "retakes.json").read_text())
    for found in told.values():
        assert len(found["steps"]) == 4
        assert found["taken"] == sum(step["sdpo/retakes"] for step in found["steps"]) > 0
    assert told["verified"]["alike"] == told["verified"]["taken"]
    assert sum(step["sdpo/retakes_learned"] for step in told["verified"]["steps"]) > 0


@pytest.mark.parametrize("mode", ["verified", "gated"])
def test_re_takes_of_several_processes_and_colocated_ones_are_refused(mode: str) -> None:
    def trainer(vllm_mode: str, processes: int) -> SimpleNamespace:
        args = SimpleNamespace(hint_mode=mode, vllm_mode=vllm_mode)
        return SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=processes))

    refuse_server(trainer("server", 1))
    for odd, says in ((("server", 2), "'server' with 2 processes"), (("colocate", 1), "'colocate'")):
        with pytest.raises(ValueError, match=f"hint_mode='{mode}' takes turns again .*{says}"):
            refuse_server(trainer(*odd))


def test_a_server_samples_at_a_re_takes_temperature_and_no_longer() -> None:
    server = SimpleNamespace(temperature=0.7, generation_kwargs={"temperature": 0.9, "seed": 1})
    with served_at(server, 0.0):
        assert (server.temperature, server.generation_kwargs) == (0.0, {"seed": 1})
    assert (server.temperature, server.generation_kwargs) == (0.7, {"temperature": 0.9, "seed": 1})


def test_the_room_for_a_hinted_context_is_what_the_server_takes_beside_an_answer() -> None:
    asked = []

    def get(url: str, timeout: float) -> SimpleNamespace:
        asked.append(url)
        return SimpleNamespace(json=lambda: {"data": [{"id": "m", "max_model_len": 86}]})

    client = SimpleNamespace(base_url="http://here", session=SimpleNamespace(get=get))
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(vllm_client=client), max_completion_length=32)
    assert [room_at_server(trainer), room_at_server(trainer)] == [54, 54] and asked == ["http://here/v1/models"]
