"""A chapter opened without the checkout that holds its figures says so in one line, and shows no
empty table.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READS = re.compile(r"golden\.json|golden_numbers\(|spikes/\w+/runs|committed_runs\(|committed_file\(")
CHAPTERS = [
    "kernels/01_policy",
    "kernels/03_divergence",
    "kernels/04_fused",
    "kernels/05_taid",
    "kernels/07_preference",
    "launching/01_job",
    "replay/23_runner",
    "training/20_diagnostics",
    "training/40_trainer",
]


def lessons(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [source for source in sources if not re.match(r"#\s*\|\s*export", source)]


def reading(chapter: str) -> str:
    """Its imports that reading needs, and the cell that reads what is committed."""
    sources = lessons(ROOT / "nbs" / f"{chapter}.ipynb")
    (cell,) = [source for source in sources if READS.search(source)]
    wanted = r"^(?:import json|from pathlib import Path|from composer_nb\.drills\.committed import .+)$"
    return "\n".join([*re.findall(wanted, "\n".join(sources), re.MULTILINE), cell])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as an installation holds it: no checkout around it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "composer_nb", site / "composer_nb", ignore=shutil.ignore_patterns("__pycache__"))
    return site


def run(code: str, folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    where = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_without_its_data_a_chapter_names_the_remedy(chapter: str, installed: Path, tmp_path: Path) -> None:
    done = run(reading(chapter), tmp_path, installed)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    assert done.returncode == 1, done.stdout
    assert re.fullmatch(r"FileNotFoundError: .* here: this page .* checkout \(git clone\), or .*", last), last


def test_what_is_committed_is_found_from_the_folder_of_a_chapter(installed: Path) -> None:
    """A wheel beside a checkout: the working folder tells where the figures are."""
    code = """
from composer_nb.drills.committed import committed_runs, golden_numbers
print(len(golden_numbers()) > 0, len(committed_runs("009_kernel_cost")) > 0)
"""
    assert run(code, ROOT / "nbs" / "kernels", installed).stdout.split() == ["True", "True"]


def test_no_chapter_reads_committed_figures_by_a_path_of_its_own() -> None:
    by_path = re.compile(r"Path\(f?[\"']\.\./")
    found = [
        path.name
        for path in sorted((ROOT / "nbs").glob("*/*.ipynb"))
        if by_path.search("\n".join(lessons(path)))
    ]
    assert found == []
