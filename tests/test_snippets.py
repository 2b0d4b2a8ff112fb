"""README and CONTRIBUTING: every fence names its language, and what it says runs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {"python", "bash", "text"}
FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    language: str
    code: str
    line: int


def snippets(text: str) -> list[Snippet]:
    """All fenced blocks, with the line each begins on."""
    return [
        Snippet(m["language"].strip(), m["code"], text.count("\n", 0, m.start()) + 1)
        for m in FENCE.finditer(text)
    ]


def commands(code: str) -> Iterator[str]:
    """The commands of a bash block, without comments and continuation lines."""
    for line in code.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command


README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "book/which_channel.md").read_text(encoding="utf-8")
SNIPPETS = snippets(README) + snippets(CONTRIBUTING) + snippets(GUIDE)


def of_language(language: str) -> list[object]:
    return [pytest.param(s.code, id=f"line-{s.line}") for s in SNIPPETS if s.language == language]


def check_make(command: str) -> None:
    """A make command must name existing targets; `-n` only plans."""
    done = subprocess.run(
        ["make", "-n", *command.split()[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def check_spike_runner(command: str) -> None:
    """A run of a spike must name an existing spike and parameters it has; nothing is run."""
    words = command.split()
    sys.path.insert(0, str(ROOT / "spikes"))
    try:
        import run
    finally:
        sys.path.pop(0)
    arguments = run.build_parser().parse_args(words[2:])
    if arguments.slug is not None:
        known = run.inspect_parameters(run.load_spike(run.find_spike(arguments.slug)))
        run.resolve_parameters(known, dict(map(run.parse_assignment, arguments.parameter)))


def check_cli(words: list[str]) -> None:
    """A line of `composer-nb` must name an existing command and options it has; nothing is run."""
    import typer

    from composer_nb.cli import app

    command = typer.main.get_command(app)
    _, sub, rest = command.resolve_command(
        command.make_context("composer-nb", [], resilient_parsing=True), words
    )
    assert sub is not None
    sub.make_context(words[0], rest)


def test_every_fence_is_closed_and_names_a_known_language() -> None:
    for text in (README, CONTRIBUTING, GUIDE):
        assert text.count("\n```") + text.startswith("```") == 2 * len(snippets(text))
    strangers = {f"line {s.line}: {s.language!r}" for s in SNIPPETS} - {
        f"line {s.line}: {s.language!r}" for s in SNIPPETS if s.language in LANGUAGES
    }
    assert not strangers


def test_readme_shows_python_and_the_two_commands() -> None:
    shown = [c for s in SNIPPETS if s.language == "bash" for c in commands(s.code)]
    assert {"make quickstart", "make test"} <= set(shown)
    assert of_language("python")


@pytest.mark.parametrize("code", of_language("python"))
def test_python_snippet_runs(code: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", of_language("bash"))
def test_bash_snippet_names_things_that_exist(code: str) -> None:
    syntax = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    assert syntax.returncode == 0, syntax.stderr
    for command in commands(code):
        words = command.split()
        if words[0] == "make":
            check_make(command)
        elif words[:2] == [".venv/bin/python", "spikes/run.py"]:
            check_spike_runner(command)
        elif Path(words[0]).name == "composer-nb":
            check_cli(words[1:])
        elif words[0].startswith(".venv/bin/"):
            assert (Path(sys.executable).parent / Path(words[0]).name).exists(), command
        else:
            assert words[0] in {"git", "cd", "pip", "python"}, f"unchecked command: {command}"


def test_a_fence_without_language_would_be_found() -> None:
    found = snippets("a\n```\nx\n```\nb\n```python\ny\n```\n")
    assert [(s.language, s.code, s.line) for s in found] == [("", "x\n", 2), ("python", "y\n", 6)]


def test_an_unknown_make_target_would_be_found() -> None:
    with pytest.raises(AssertionError, match="no-such-target"):
        check_make("make no-such-target")


def test_an_unknown_option_of_the_command_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        check_cli(["wheelhouse", "out", "--no-such-option"])
