"""Scripts of ladders, on a tiny model: loaded by their spike, with settings and a start."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from test_ladder_arms import SETTINGS
from tiny import saved_model, tokenizer

SPIKES = Path(__file__).resolve().parents[1] / "spikes"


def load_arm(spike: str) -> ModuleType:
    "The script of a spike's cells, under a name of its own."
    name = f"arm_of_{spike}"
    found = importlib.util.spec_from_file_location(name, SPIKES / spike / "arm.py")
    sys.modules[name] = arm = importlib.util.module_from_spec(found)
    found.loader.exec_module(arm)
    return arm


@contextmanager
def begun(arm: ModuleType, folder: Path, **more: Any) -> Iterator[dict[str, Any]]:
    "Settings with a start made of a random model; `before` is what it makes of text that no arm trains on."
    threads = torch.get_num_threads()
    saved_model(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    places = {"model": str(folder / "tiny"), "start": str(folder / "start")}
    found = SETTINGS | places | {"device": "cpu", "seed": 0} | more
    made = arm.cell(found | {"arm": "start"}, "")
    yield found | {"before": made["figures"]["general_nll"], "folder": folder}
    torch.set_num_threads(threads)


def trained(arm: ModuleType, spec: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    "What a cell of one arm answers."
    asked = {key: value for key, value in (spec | settings).items() if key not in ("before", "folder")}
    return arm.cell(asked | {"arm": name}, str(spec["folder"] / name), lambda line: None)
