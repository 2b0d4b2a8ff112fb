"""The pytest plugin under which TRL's tests run here: which trainer they see, what cannot run, what came out.

`TRL_SUITE_TRAINER` names the trainer (trl, ours, ours_shared), `TRL_SUITE_HUB` the folder of the
hubs, `TRL_SUITE_RESULTS` the file of results, one JSON object a line, and `TRL_SUITE_SECONDS` how long a
case may take. Cases with a result are not run again.
"""

import hashlib
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

TRAINERS = ("trl", "ours", "ours_shared")
# What a case needs and this suite has not: matched against its name, first match counts.
CANNOT = (
    (r"Gemma4|Qwen2_5_VL|Qwen2VL|Qwen3_5|tools_multimodal", "its model's processor needs torchvision"),
    (r"test_vlm_", "needs SmolVLM's weights, which only the hub has"),
)


def why_not_run(case: str) -> str | None:
    """The reason why a case cannot run here, or None."""
    return next((reason for pattern, reason in CANNOT if re.search(pattern, case)), None)


def digest(file: Path) -> str:
    """The start of a file's sha256; empty where it is gone."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def loaded_modules(package: str = "composer_nb") -> dict[str, str]:
    """The package's modules that this process has loaded, by their path in it, with the start of the sha256
    of their source.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if name.split(".")[0] == package and source and source.endswith(".py"):
            path = Path(source)
            depth = name.count(".") + (path.name == "__init__.py")
            place = "/".join(path.parts[-depth:]) if depth else path.name
            found[place] = digest(path)
    return dict(sorted(found.items()))


def our_trainer(share_prefixes: bool) -> type:
    """`ComposerReplicationTrainer` with both added channels off, to be called as TRL's `GRPOTrainer` is."""
    from composer_nb.trainer import ComposerReplicationTrainer

    class GRPOTrainer(ComposerReplicationTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            own = {"alpha_sdpo": 0.0, "beta_replay": 0.0, "share_prefixes": share_prefixes}
            super().__init__(*args, **own, **options)

    return GRPOTrainer


def replace_trainer(name: str) -> None:
    """Makes `from trl import GRPOTrainer` give the named trainer."""
    import trl

    if name not in TRAINERS:
        raise ValueError(f"trainer {name!r} is none of {', '.join(TRAINERS)}")
    if name != "trl":
        trl.GRPOTrainer = our_trainer(share_prefixes=name == "ours_shared")


def answer_newer_questions() -> None:
    """Lets the tests' helpers ask `trl.import_utils` for packages that the installed version
    never asks for.
    """
    from trl import import_utils

    def asked(name: str) -> Callable[[], bool]:
        if (found := re.fullmatch(r"is_(\w+)_available", name)) is None:
            raise AttributeError(name)
        return lambda: importlib.util.find_spec(found[1]) is not None

    import_utils.__getattr__ = asked


def hub_of(test: Callable[..., Any]) -> str:
    """The hub of Qwen's ids for a test that writes one of its special tokens down."""
    return "qwen" if re.search(r"\b1516[4-6]\d\b", inspect.getsource(test)) else "small"


def case_of(nodeid: str) -> str:
    """`Class::test[parameters]`, without the file."""
    return nodeid.split("::", 1)[1].removeprefix("()::")


def results_of(file: Path) -> dict[str, dict[str, Any]]:
    """The last line of each case in a file of results."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {found["case"]: found for found in map(json.loads, lines)}


def plain(text: str) -> str:
    """The first line of a message, with folders taken out of paths and addresses out of objects."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    without = re.sub(r"(?:/[\w.+@-]+)+/(?=[\w.])", "", first)
    return re.sub(r" at 0x[0-9a-f]+", "", without)[:300]


def outcome_of(report: pytest.TestReport) -> tuple[str, str]:
    """The word for a phase's outcome, and why."""
    if hasattr(report, "wasxfail"):
        return "failed as expected" if report.skipped else "passed", plain(report.wasxfail)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "skipped", plain(reason.removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.outcome, "" if report.passed else plain(crash.message if crash else str(report.longrepr))


class Results:
    """Runs what has no result yet, each case with the same seed and under a time limit, and
    writes it down.
    """

    def __init__(self, file: Path, hub: Path, seconds: int) -> None:
        self.file, self.hub, self.seconds = file, hub, seconds

    def write(self, case: str, outcome: str, **more: Any) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps({"case": case, "outcome": outcome, **more}) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done, names = results_of(self.file), [case_of(item.nodeid) for item in items]
        (self.file.parent / "cases.json").write_text(json.dumps(names))
        items[:] = [item for item, name in zip(items, names) if name not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(case_of(nodeid), "started")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        result = yield  # the case's own marks first: they say more
        if reason := why_not_run(case_of(item.nodeid)):
            pytest.skip(reason)
        os.chdir(self.hub / hub_of(item.function))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        from transformers import set_seed

        def stop(*_: Any) -> None:
            raise TimeoutError(f"no end after {self.seconds} s")

        set_seed(0)
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(self.seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_sessionfinish(self) -> None:
        kept = self.file.with_suffix(".modules.json")
        before = json.loads(kept.read_text()) if kept.is_file() else {}
        kept.write_text(json.dumps(before | loaded_modules()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome, why = outcome_of(report)
            seconds = round(report.duration, 1)
            ran = {"ran": report.when != "setup", "seconds": seconds}
            self.write(case_of(report.nodeid), outcome, why=why, **ran)


def hide_triton() -> None:
    """Where there is no GPU. Liger's kernels need one, and with Triton installed Liger finds that out after
    it changed the classes of a model: every case after that has the changed ones.
    """
    if not torch.cuda.is_available():
        sys.modules["triton"] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    if (name := os.environ.get("TRL_SUITE_TRAINER")) is None:
        return
    hide_triton()  # before anything of transformers or TRL is imported
    answer_newer_questions()
    replace_trainer(name)
    seconds = int(os.environ.get("TRL_SUITE_SECONDS", "120"))
    file, hub = Path(os.environ["TRL_SUITE_RESULTS"]), Path(os.environ["TRL_SUITE_HUB"])
    config.pluginmanager.register(Results(file, hub, seconds))
    config.addinivalue_line("markers", "slow: a mark of TRL's")
