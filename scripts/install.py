"""Install with uv, which is much faster than pip: the same arguments, and what pip is configured with.

`python scripts/install.py ARGUMENTS` does what `python -m pip install ARGUMENTS` does. uv reads nothing of
pip's configuration, so indexes, folders of wheels, constraints and certificates are handed over; where pip is
told something that uv would not be told, or where uv cannot be had or fails, pip installs and one line says
why. `INSTALLER=pip` asks for pip. The pin of uv stands in constraints.txt.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable)
# Each as pip names it, and what uv calls it; several words stand for several options.
HANDED_OVER = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
# What changes nothing about which packages are installed and where.
WITHOUT_EFFECT = {
    "cache-dir", "cert", "config-file", "default-timeout", "disable-pip-version-check", "no-color",
    "no-input", "progress-bar", "quiet", "require-virtualenv", "retries", "timeout", "verbose",
}  # fmt: skip


def configured(lines: str) -> dict[str, str]:
    """What `pip config list` wrote, by name; a variable of the environment wins over a file, as it does for
    pip. Raises ValueError for a line that is no `section.name='value'`.
    """
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in filter(None, map(str.strip, lines.splitlines())):
        key, sign, value = line.partition("=")
        section, dot, name = key.rpartition(".")
        if not (sign and dot):
            raise ValueError(f"pip's configuration says {line!r}, which is no section.name='value'")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def options(configuration: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Options and environment variables that tell uv the same. ValueError where it cannot be told."""
    if unknown := sorted(set(configuration) - set(HANDED_OVER) - WITHOUT_EFFECT):
        raise ValueError(f"pip is configured with {', '.join(unknown)}, which uv is not told")
    words = ["--index-strategy", "unsafe-best-match"]  # all indexes count alike, as they do for pip
    for name, option in HANDED_OVER.items():
        words += [word for value in configuration.get(name, "").split() for word in (option, value)]
    variables = {}
    if "cert" in configuration:
        variables["SSL_CERT_FILE"] = configuration["cert"]
    if seconds := configuration.get("timeout", configuration.get("default-timeout")):
        variables["UV_HTTP_TIMEOUT"] = seconds
    return words, variables


def by_uv(words: Sequence[str]) -> str:
    """Install with uv: the empty string, or why it could not be done."""
    quiet = ["install", "-q", "--retries", "1", "-c", str(CONSTRAINTS), "uv"]
    if subprocess.run([*PIP, *quiet], check=False).returncode:
        return "uv could not be installed"
    said = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    try:
        known = configured(said)
        if any(word.partition("=")[0] in ("-i", "--index-url") for word in words):
            known.pop("index-url", None)  # a word wins over a file, as it does for pip
        told, variables = options(known)
    except ValueError as error:
        return str(error)
    done = subprocess.run([*UV, *told, *words], env=os.environ | variables, check=False)
    return f"uv ended with {done.returncode}" if done.returncode else ""


def main(words: Sequence[str]) -> int:
    installer = os.environ.get("INSTALLER", "uv")
    if installer not in ("uv", "pip"):
        print(f"error: INSTALLER={installer} is neither uv nor pip", file=sys.stderr)
        return 2
    if installer == "uv":
        if not (reason := by_uv(words)):
            return 0
        print(f"{reason}; pip installs, which takes longer", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--no-compile", *words], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
