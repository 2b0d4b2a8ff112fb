"""Check that the generated modules are exactly what the notebooks export, in a temporary copy of the tree.

Every generated module but `__init__.py` is removed before the export, so a module whose notebook is gone
is found too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_nb"
COPIED = (PACKAGE, "nbs", "settings.ini", "pyproject.toml")
JUNK = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".last_checked")
GIT = (
    "git",
    "-c",
    "user.name=sync",
    "-c",
    "user.email=sync@localhost",
    "-c",
    "core.autocrlf=false",
    "-c",
    "commit.gpgsign=false",
)


class ExportError(RuntimeError):
    """The notebooks could not be exported; the message is nbdev's."""


def copy_tree(root: Path, destination: Path, names: Sequence[str] = COPIED) -> None:
    """Copy what nbdev needs of `root`; a missing name is an error."""
    for name in names:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=JUNK)
        else:
            shutil.copy2(source, destination / name)


def run_nbdev(tool: str, cwd: Path) -> str:
    """Run an nbdev command beside this Python in `cwd`; returns its output, raises `ExportError` on any
    failure.
    """
    # IN_TEST silently disables nbdev_export; a user's own nbdev defaults must not leak in.
    environment = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | {
        "XDG_CONFIG_HOME": str(cwd / ".config")
    }
    program = Path(sys.executable).parent / tool
    done = subprocess.run(
        [program],
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise ExportError(f"{tool} failed:\n{output}")
    return output


def generated_modules(package: Path) -> list[Path]:
    """All Python files of the package but those kept by hand: `__init__.py`, and what is under `drills/`."""
    kept = package / "drills"
    return sorted(p for p in package.rglob("*.py") if p.name != "__init__.py" and kept not in p.parents)


def out_of_sync(root: Path = ROOT) -> str:
    """Return git's porcelain status and the differences after a fresh export, or an empty string when in
    sync.
    """
    with tempfile.TemporaryDirectory(prefix="composer_nb_sync_") as folder:
        copy = Path(folder)
        copy_tree(root, copy)

        def git(*arguments: str) -> str:
            done = subprocess.run([*GIT, *arguments], cwd=copy, check=True, capture_output=True, text=True)
            return done.stdout

        git("init", "-q")
        git("add", "--force", PACKAGE)
        git("commit", "-q", "--no-verify", "--allow-empty", "-m", "as found")
        for module in generated_modules(copy / PACKAGE):
            module.unlink()
        exported = run_nbdev("nbdev_export", copy)
        if "without `#| default_exp`" in exported:
            raise ExportError(exported)
        status = git("status", "--porcelain", "--untracked-files=all", PACKAGE)
        return status + git("diff", "--", PACKAGE) if status else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    root = parser.parse_args(argv).root
    try:
        difference = out_of_sync(root)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 1
    if difference:
        print(difference, file=sys.stderr)
        print(
            f"{PACKAGE}/ differs from what nbs/ exports: run `make export`, and delete stale modules.",
            file=sys.stderr,
        )
        return 1
    print(f"{PACKAGE}/: {len(generated_modules(root / PACKAGE))} generated modules in sync with nbs/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
