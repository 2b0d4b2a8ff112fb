"""What holds for every test: parity runs first, then the files that take longest; a skipped parity test is a
failed one.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
PARITY = TESTS / "parity"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; read when triton is imported


settings.register_profile("book", deadline=None)  # a busy core is no fault of an example
settings.load_profile("book")


def in_parity(path: Path) -> bool:
    return path.resolve().is_relative_to(PARITY)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: builds or installs something; takes a minute")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kept = TESTS / "seconds.json"  # of each file, written by scripts/run_tests.py --record
    took = json.loads(kept.read_text()) if kept.exists() else {}
    items.sort(key=lambda item: (not in_parity(item.path), -took.get(item.nodeid.split("::")[0], 0)))


def pytest_collection_finish() -> None:
    """What the modules of tests have imported lives to the end: no collection need look through it again."""
    gc.collect()
    gc.freeze()


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that keeps the reason. An expected failure stays what it is."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a parity test may not be skipped: {reason}"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if in_parity(item.path):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if in_parity(collector.path):
        fail_if_skipped(report)
    return report


@pytest.fixture
def from_book(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of `book/`, which is no package, and forgets it after the test."""
    monkeypatch.syspath_prepend(str(TESTS.parent / "book"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("composer_") and name not in before]:
        if not name.startswith("composer_nb"):
            del sys.modules[name]


@pytest.fixture
def processes():
    """A list for processes that must not outlive the test."""
    started: list = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()
