"""Every arm with every seed, once: what is kept, what is made again, and what does not count."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import composer_nb
from composer_nb.launch.ladder import Cell, Ladder, cells_of, find_ladder, read_ladder, run_ladder, run_plan
from composer_nb.results import EvidenceError

ROOT = Path(composer_nb.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import check_runs  # noqa: E402

SCRIPT = """
import json, os, pathlib, sys, time
asked = json.load(open(sys.argv[1]))
start = pathlib.Path(asked["start"])
if asked["arm"] == "start":
    start.mkdir(exist_ok=True)
    (start / "weights").write_text("7")
    value = 7.0
else:
    if asked["sleep"]:
        print("sleeping", os.getpid(), flush=True)
        time.sleep(asked["sleep"])
    value = asked["seed"] + float((start / "weights").read_text() if start.is_dir() else 0)
if asked["fail"] == asked["arm"]:
    raise SystemExit("no luck")
answer = {"figures": {"value": value}, "series": {"values": [value]}}
if asked["fail"] == "answer " + asked["arm"]:
    answer = {"figures": {"value": float("nan")}, "series": {}}
if asked["fail"] != "silent " + asked["arm"]:
    json.dump(answer, open(sys.argv[2], "w"))
"""
SETTINGS = {"sleep": 0, "fail": ""}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "arm.py"
    path.write_text(SCRIPT)
    return path


def names(folder):
    return sorted(path.parent.name for path in Path(folder).glob("*/metrics.json"))


def run(ladder, folder, script, **options):
    return run_ladder(ladder, folder / "cells", script, folder / "work", progress=False, **options)


def test_every_cell_runs_once_from_one_start(tmp_path, script):
    ladder = Ladder("s", ("a", "b"), (3, 5), SETTINGS, start="start")
    assert run(ladder, tmp_path, script, jobs=2) == []
    found = cells_of(ladder, tmp_path / "cells")
    assert [cell.name for cell in found] == ["start-0", "a-3", "b-3", "a-5", "b-5"]
    assert [found[cell]["figures"]["value"] for cell in ladder.cells] == [10, 10, 12, 12]
    assert len({found[cell]["params"]["start_id"] for cell in ladder.cells}) == 1
    assert all(one["threads"] == 1 and one["seeds"] == [cell.seed] for cell, one in found.items())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/metrics.json")}
    assert run(ladder, tmp_path, script) == []
    shutil.rmtree(tmp_path / "work")  # another machine
    more = Ladder("s", ("a", "b"), (3, 5, 6), SETTINGS, start="start")
    assert run(more, tmp_path, script, jobs=1) == []
    assert cells_of(more, tmp_path / "cells")[Cell("b", 6)]["figures"]["value"] == 13
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())


@pytest.mark.parametrize("fail", ["b", "answer b", "silent b"])
def test_what_fails_is_said_and_stops_nothing_else(tmp_path, script, fail):
    ladder = Ladder("s", ("a", "b"), (0, 1), SETTINGS | {"fail": fail})
    failed = run(ladder, tmp_path, script, jobs=1)
    assert [reason.split(":")[0] for reason in failed] == ["b-0", "b-1"]
    assert {"b": "no luck", "answer b": "not finite", "silent b": "wrote no answer"}[fail] in failed[0]
    assert names(tmp_path / "cells") == ["a-0", "a-1"]
    with pytest.raises(FileNotFoundError, match="2 of 4 cells are missing"):
        cells_of(ladder, tmp_path / "cells")


def test_without_its_start_nothing_runs(tmp_path, script):
    ladder = Ladder("s", ("a",), (0,), SETTINGS | {"fail": "start"}, start="start")
    assert [reason.split(":")[0] for reason in run(ladder, tmp_path, script)] == ["start-0"]
    assert names(tmp_path / "cells") == []


def alive(pid):
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except (OSError, FileNotFoundError):
        return False


RUNNER = """
import signal, sys
# a shell's background job ignores it, and so would this
signal.signal(signal.SIGINT, signal.default_int_handler)
from composer_nb.launch.ladder import Ladder, run_ladder
ladder = Ladder("s", ("a", "b"), (0, 1), {"sleep": float(sys.argv[2]), "fail": ""}, start=sys.argv[3])
folder = sys.argv[1]
raise SystemExit(len(run_ladder(ladder, folder + "/cells", folder + "/arm.py", folder + "/work", jobs=1)))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_runner_leaves_no_process_and_what_had_ended(tmp_path, script, number):
    words = [sys.executable, "-c", RUNNER, str(tmp_path), "1.5", ""]
    runner = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    logs = lambda: sorted((tmp_path / "work" / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
    while len(logs()) < 2 or "sleeping" not in logs()[-1].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int(logs()[-1].read_text().split("sleeping")[1].split()[0])
    runner.send_signal(number)
    runner.wait(30)
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert names(tmp_path / "cells") == ["a-0"]
    kept = (tmp_path / "cells" / "a-0" / "metrics.json").read_bytes()
    ladder = Ladder("s", ("a", "b"), (0, 1), {"sleep": 1.5, "fail": ""})
    assert run(ladder, tmp_path, script, jobs=3) == []
    assert names(tmp_path / "cells") == ["a-0", "a-1", "b-0", "b-1"]
    assert (tmp_path / "cells" / "a-0" / "metrics.json").read_bytes() == kept


@pytest.mark.parametrize("start", ["", "start"])
def test_two_runners_share_a_ladder(tmp_path, script, start):
    words = [sys.executable, "-c", RUNNER, str(tmp_path), "0.6", start]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    runners = [subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment) for _ in range(2)]
    assert [runner.wait(120) for runner in runners] == [0, 0]
    cells = ["a-0", "a-1", "b-0", "b-1"]
    assert names(tmp_path / "cells") == cells + ["start-0"] * bool(start)
    said = [path.read_text() for path in (tmp_path / "work" / "logs").glob("*.log")]
    assert len(said) == 4 + bool(start) and sum("sleeping" in text for text in said) == 4


@pytest.mark.parametrize(
    "text, said",
    [
        ("[1, 2]", "no plan"),
        ("spike: s", "no plan"),
        ("a: b: c", "no YAML"),
        ("{spike: s, arms: [a], seeds: [0], threads: 2}", "holds threads"),
        ("{spike: s, arms: [], seeds: [0]}", "arms"),
        ("{spike: s, arms: [a], seeds: [0, 0]}", "seeds"),
        ("{spike: s, arms: [a], seeds: [one]}", "seeds"),
        ("{spike: s, arms: plain, seeds: [0]}", r"arms='plain' is no list; write arms: \[plain\]"),
        ("{spike: s, arms: [a], seeds: 3}", r"seeds=3 is no list; write seeds: \[3\]"),
        ("{spike: s, arms: [a], seeds: [true]}", "seeds"),
        ("{spike: s, arms: [a], seeds: [0], settings: {seed: 1}}", "settings hold seed"),
        ("{spike: s, arms: [a], seeds: [0], settings: {device: cuda}}", "settings hold device"),
        ("{spike: s, arms: [a], seeds: [0], start: a}", "start='a' is an arm too"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(tmp_path, text, said):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_ladder(tmp_path / "plan.yaml")


def test_bad_words_are_refused(tmp_path, script):
    with pytest.raises(ValueError, match="jobs=-1"):
        run(Ladder("s", ("a",), (0,), SETTINGS), tmp_path, script, jobs=-1)
    with pytest.raises(FileNotFoundError):
        read_ladder(tmp_path / "none.yaml")


# --- in a checkout -----------------------------------------------------------------------------------


def git(root, *words):
    who = ["-c", "user.name=T", "-c", "user.email=t@example.com"]
    return subprocess.run(
        ["git", "-C", root, *who, *words], capture_output=True, text=True, check=True
    ).stdout


def commit(root, message):
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)


@pytest.fixture
def plan(tmp_path):
    "A checkout with a package, a spike and a plan, which is not committed yet."
    root = tmp_path / "tree"
    spike = root / "spikes" / "s"
    folder = spike / "ladders" / "first"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "composer_nb", root / "composer_nb", ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".gitignore").write_text("__pycache__/\n")
    (spike / "arm.py").write_text(SCRIPT)
    (spike / "plan.md").write_text("Rule: none.\n")
    git(tmp_path, "init", "-q", str(root))
    commit(root, "package and spike")
    content = {"spike": "s", "arms": ["a", "b"], "seeds": [0], "settings": SETTINGS}
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    return folder / "plan.yaml"


def in_tree(plan, *words):
    "The command line of the package in the plan's own tree."
    root = plan.parents[4]
    command = [sys.executable, "-m", "composer_nb.cli", "ladder", *words, str(plan)]
    code = "import sys; from composer_nb.cli import main; sys.argv = ['composer-nb'] + sys.argv[1:]; main()"
    command = [sys.executable, "-c", code, "ladder", *words, str(plan)]
    work = ["--work", str(root.parent / "work")] if words[0] == "run" else []
    return subprocess.run(
        [*command, *work],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )


def test_cells_of_a_plan_are_evidence(plan):
    root = plan.parents[4]
    refused = in_tree(plan, "run")
    assert refused.returncode == 1 and "first/plan.yaml is not committed" in refused.stderr
    commit(root, "plan")
    (root / "composer_nb" / "core.py").open("a").write("# changed\n")
    refused = in_tree(plan, "run")
    assert refused.returncode == 1 and "the tree is dirty" in refused.stderr, refused.stderr
    git(root, "checkout", "-q", ".")
    assert "missing" in in_tree(plan, "show").stdout
    done = in_tree(plan, "run")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((plan.parent / "a-0" / "metrics.json").read_text())
    assert metrics["commit"] == git(root, "rev-parse", "HEAD").strip()
    assert set(metrics["git"]) == {"package", "arm.py", "plan"} and metrics["verdict"] == "open"
    rows = find_ladder(plan).rows()
    assert [row["state"] for row in rows] == ["done", "done"] and rows[0]["commit"] == metrics["commit"]
    commit(root, "cells")
    assert check_runs.all_faults(root) == []
    cell = plan.parent / "a-0" / "metrics.json"
    cell.write_text(json.dumps(metrics | {"figures": {"value": 1.0}}))
    assert "changed after the run was committed" in str(check_runs.all_faults(root))
    git(root, "checkout", "-q", ".")
    plan.write_text(plan.read_text() + "start: start\n")
    assert "plan.yaml was changed after this cell" in str(check_runs.all_faults(root))
    git(root, "checkout", "-q", ".")
    git(root, "rm", "-q", str(plan))
    assert "no plan.yaml beside it" in str(check_runs.all_faults(root))
    git(root, "reset", "-q", "--hard")
    git(root, "rm", "-rq", str(cell.parent))
    assert "gone from the tree" in str(check_runs.all_faults(root))


def test_a_cell_from_nowhere_is_found(plan):
    root = plan.parents[4]
    commit(root, "plan")
    assert in_tree(plan, "run").returncode == 0
    cell = plan.parent / "a-0" / "metrics.json"
    made = json.loads(cell.read_text())
    cell.write_text(json.dumps(made | {"git": made["git"] | {"arm.py": "0" * 40}}))
    shutil.move(plan.parent, plan.parent.with_name("second"))  # its plan is younger than its cells
    commit(root, "cells")
    faults = check_runs.all_faults(root)
    assert any("no commit before it holds its arm.py" in fault for fault in faults)
    assert any("plan.yaml is younger than the cell" in fault for fault in faults)


def test_a_plan_elsewhere_is_refused(tmp_path, script):
    (tmp_path / "plan.yaml").write_text("{spike: s, arms: [a], seeds: [0]}")
    with pytest.raises(ValueError, match="spikes/s/ladders/NAME/plan.yaml"):
        find_ladder(tmp_path / "plan.yaml")
    place = tmp_path / "spikes" / "s" / "ladders" / "first"
    place.mkdir(parents=True)
    shutil.copy(tmp_path / "plan.yaml", place)
    with pytest.raises(EvidenceError, match="not committed"):
        run_plan(place / "plan.yaml")


def test_cells_of_other_settings_are_refused(tmp_path, script):
    ladder = Ladder("s", ("a",), (0,), SETTINGS)
    assert run(ladder, tmp_path, script) == []
    with pytest.raises(EvidenceError, match="other settings .sleep."):
        cells_of(Ladder("s", ("a",), (0,), SETTINGS | {"sleep": 1}), tmp_path / "cells")
    (tmp_path / "cells" / "a-0").rename(tmp_path / "cells" / "a-1")
    with pytest.raises(EvidenceError, match="seeds"):
        cells_of(Ladder("s", ("a",), (1,), SETTINGS), tmp_path / "cells")
