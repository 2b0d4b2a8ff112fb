"""`tests/conftest.py` on a small suite: a skipped parity test fails, other skips stay skips, parity runs
first.
"""

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")


def run_suite(folder: Path, parity: str, other: str = "") -> str:
    tests = folder / "tests"
    (tests / "parity").mkdir(parents=True)
    shutil.copy(CONFTEST, tests)
    (tests / "parity" / "test_numbers.py").write_text("import pytest\n" + parity)
    (tests / "test_a_first_by_name.py").write_text("import pytest\n" + other)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    ran = (0, 1, 2)  # all passed, some failed, stopped while collecting; above: pytest itself went wrong
    assert done.returncode in ran, done.stdout + done.stderr
    return done.stdout


def test_skip_in_parity_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    shown = run_suite(
        tmp_path,
        "def test_a(): pytest.skip('no upstream')\n@pytest.mark.skip(reason='later')\ndef test_b(): pass\n",
    )
    assert "may not be skipped: Skipped: no upstream" in shown
    assert "may not be skipped: Skipped: later" in shown
    assert "skipped" not in shown.splitlines()[-1]


def test_skipped_parity_module_is_a_failure(tmp_path: Path) -> None:
    shown = run_suite(tmp_path, "pytest.importorskip('no_such_upstream')\ndef test_a(): pass\n")
    assert "may not be skipped" in shown and "no_such_upstream" in shown
    assert "1 error" in shown.splitlines()[-1]


def test_skips_elsewhere_and_expected_failures_stay_what_they_are(tmp_path: Path) -> None:
    parity = (
        "@pytest.mark.xfail(strict=True)\ndef test_a(): assert False\ndef test_b(): pytest.xfail('known')\n"
    )
    shown = run_suite(tmp_path, parity, "def test_c(): pytest.skip('no browser')\n")
    assert "1 skipped, 2 xfailed" in shown.splitlines()[-1]


def test_parity_runs_first(tmp_path: Path) -> None:
    shown = run_suite(tmp_path, "def test_z(): pass\n", "def test_a(): pass\n")
    assert shown.index("test_numbers.py::test_z") < shown.index("test_a_first_by_name.py::test_a")
