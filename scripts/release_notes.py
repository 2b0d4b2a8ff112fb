"""Print the changelog's section for a tag: `python scripts/release_notes.py v0.1.0`. Needs nothing but
Python.

Fails when the tag is not the version that pyproject.toml declares, or when the changelog has no section
for it.
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def section(changelog: str, version: str) -> str:
    """The text below `## [version]`, up to the next section. Raises ValueError when it is missing, empty or
    without a date.
    """
    head = rf"^## \[{re.escape(version)}\](?P<date>[^\n]*)\n"
    found = re.search(rf"{head}(?P<text>.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found["text"].strip():
        raise ValueError(f"CHANGELOG.md has no section [{version}]: write it before tagging")
    if not re.search(r"\d{4}-\d\d-\d\d", found["date"]):
        raise ValueError(
            f"CHANGELOG.md's section [{version}] has no date: "
            "write the day of the release instead of Unreleased"
        )
    return found["text"].strip()


def notes(tag: str, root: Path = ROOT) -> str:
    """The notes of a release, checked against the version of the package."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{declared}":
        raise ValueError(
            f"tag {tag} does not match version {declared}: tag v{declared}, or change the version"
        )
    return section((root / "CHANGELOG.md").read_text(encoding="utf-8"), declared)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: python scripts/release_notes.py TAG", file=sys.stderr)
        return 2
    try:
        print(notes(words[0]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
