"""Install this archive of the book into the kernel that asks for it: what the launch cell of a page hands
over to.

Runs inside Colab's or Kaggle's live kernel, before anything is installed, so it needs nothing but Python
and pip.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1]
PACKAGE, DISTRIBUTION, NAMESAKE = "composer_nb", "composer-notebooks", "composer-nb"
OLDEST_PYTHON, OLDEST_SETUPTOOLS = (3, 11), 77
OFFLINE = (
    "switch on the internet (Kaggle: Settings > Internet), "
    "or attach the folder that `composer-nb wheelhouse` writes"
)
UNREACHABLE = (
    "Failed to establish",
    "NameResolution",
    "name resolution",
    "ProxyError",
    "ConnectTimeout",
    "Max retries",
)


def wheelhouse() -> Path | None:
    """The folder of wheels that a reader attached, if any."""
    named = os.environ.get("COMPOSER_NB_WHEELHOUSE")
    folders = [Path(named)] if named else sorted(Path("/kaggle/input").glob("*"))
    found = [folder for folder in folders if any(folder.glob(f"{DISTRIBUTION.replace('-', '_')}-*.whl"))]
    if named and not found:
        raise SystemExit(
            f"COMPOSER_NB_WHEELHOUSE={named} holds no wheel of {DISTRIBUTION}: "
            "write it with `composer-nb wheelhouse`"
        )
    return found[0] if found else None


def refuse_what_cannot_work() -> None:
    """An old Python, or the package of the same import name that belongs to somebody else."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        found, needed = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        raise SystemExit(f"composer_nb needs Python {needed} or newer, this kernel is Python {found}")
    if any(importlib.metadata.distributions(name=NAMESAKE)):
        raise SystemExit(
            f"{NAMESAKE}, a music package of the same import name, is installed: "
            f"run `%pip uninstall -y {NAMESAKE}` first"
        )


def pip(*words: str) -> None:
    """Run pip in this kernel's environment; one line says what failed, the rest of pip's own words stay
    below it.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-color",
        "--disable-pip-version-check",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    if any(sign in done.stderr for sign in UNREACHABLE):
        raise SystemExit(f"The package index could not be reached: {OFFLINE}.")
    raise SystemExit(
        f"pip could not install {words[-1]}: its own words stand above. If it found no version that fits, "
        "use a kernel of Python 3.11, 3.12 or 3.13; if the disk is full, free some and run this cell again."
    )


def build_options() -> list[str]:
    """Without a build environment of its own where the kernel's setuptools is new enough: nothing is fetched
    for it.
    """
    try:
        found = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        found = 0
    return ["--no-build-isolation"] if found >= OLDEST_SETUPTOOLS else []


def installed(list_of_pins: Path) -> bool:
    """Whether every `name==version` of a list is there already, so that pip need not be asked."""
    lines = (line.split("#")[0].strip() for line in list_of_pins.read_text(encoding="utf-8").splitlines())
    for name, _, version in (line.partition("==") for line in lines if line):
        found = next(iter(importlib.metadata.distributions(name=name)), None)
        if found is None or found.version != version:
            return False
    return True


def receipt() -> Path:
    """Where this kernel's environment keeps which archive was installed, with which extras."""
    return Path(sysconfig.get_path("purelib")) / f"{DISTRIBUTION}.installed.json"


def digest() -> str:
    """SHA-256 of what would be installed: the package and its metadata."""
    content = hashlib.sha256((BOOK / "pyproject.toml").read_bytes())
    for path in sorted((BOOK / PACKAGE).rglob("*.*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content.update(path.relative_to(BOOK).as_posix().encode() + path.read_bytes())
    return content.hexdigest()


def already(extras: set[str]) -> bool:
    """Whether this very archive is installed with these extras, so that a second page need not
    wait for pip.
    """
    if not receipt().is_file() or not any(importlib.metadata.distributions(name=DISTRIBUTION)):
        return False
    kept = json.loads(receipt().read_text(encoding="utf-8"))
    return kept["digest"] == digest() and extras <= set(kept["extras"])


def forget() -> None:
    """Drop an older copy of the package from this kernel, so that the next import finds the installed one."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()


def install(folder: str, extras: str) -> None:
    """Install the package with `extras` and the data wheels, and change into `folder` of the archive."""
    refuse_what_cannot_work()
    house, needs = wheelhouse(), f"[{extras}]" if extras else ""
    wanted = set(filter(None, extras.split(",")))
    if already(wanted):
        os.chdir(BOOK / folder)
        print(f"Ready, in {folder}: {DISTRIBUTION}{needs} of this archive is installed.")
        return
    print(
        f"Installing {DISTRIBUTION}{needs} from {house or BOOK.name}; this takes up to a minute or two.",
        flush=True,
    )
    if house:
        options = ["--no-index", "--find-links", str(house)]
        pip(*options, f"{DISTRIBUTION}{needs}")
    else:
        options = []
        pip(*build_options(), f"{BOOK}{needs}")
    data = BOOK / "requirements-data.txt"
    if not installed(data):
        pip(*options, "--no-deps", "-r", str(data))
    receipt().write_text(json.dumps({"digest": digest(), "extras": sorted(wanted)}), encoding="utf-8")
    forget()
    os.chdir(BOOK / folder)
    print(f"Ready, in {folder}.")
