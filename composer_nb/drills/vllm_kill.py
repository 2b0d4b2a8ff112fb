"""A server that is killed and comes back: `python -m composer_nb.drills.vllm_kill FOLDER` in vLLM's environment.

Its second life begins with the weights it was started with. Leaves `kill.json`.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from composer_nb.adapters.vllm_client import SamplingClient
from composer_nb.adapters.vllm_server import serve, version_at
from composer_nb.core import token_logprobs
from composer_nb.drills.vllm_train import scores, small_letters
from composer_nb.models import load_model


ROWS = "completion_ids", "logprobs"


def apart_of(model: Any, prompt: list[int], ids: list[int], logprobs: list[list[float]]) -> float:
    "Largest difference of an answer's own log-probs to the model's."
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    own = token_logprobs(logits, torch.tensor(ids))
    return (own - torch.tensor([row[0] for row in logprobs])).abs().max().item()


def asked_meanwhile(client: Any, folder: Path, port: int, stack: Any, text: list[int]) -> tuple[Any, Any]:
    "Ask a server that is gone, while somebody starts it again; the answer, and what was warned of."

    def come_back() -> None:
        stack.enter_context(serve(str(folder / "model"), threads=1, length=128, port=port))

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            return client.generate([text[:8]], n=4, max_tokens=6), heard
    finally:
        thread.join()


def main(folder: Path) -> None:
    "Send, kill, ask; meanwhile somebody starts it again."
    small_letters(folder / "model")
    model, _ = load_model(str(folder / "model"))
    text = list(range(5, 60, 2))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve(str(folder / "model"), threads=1, length=128))
        client = SamplingClient(folder / "weights", base_url=first.url, wait_s=240.0)
        client.init_communicator()
        began = scores(client, model, text)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * weight.std() * 0.1)
        moved = scores(client, model, text)
        client.update_model_params(model)
        sent = scores(client, model, text)
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
        answer, heard = asked_meanwhile(client, folder, urlparse(first.url).port, stack, text)
        told = {
            "began": began, "moved": moved, "sent": sent, "back": scores(client, model, text),
            "answers": len(answer["completion_ids"]), "again": client.again,
            "version": version_at(first.url) == client.told.version,
            "heard": sum("sent again" in str(w.message) for w in heard),
            "sampled": max(apart_of(model, text[:8], *row) for row in zip(*map(answer.get, ROWS))),
        }  # fmt: skip
    (folder / "kill.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
