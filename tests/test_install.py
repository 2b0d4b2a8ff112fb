"""Packages are installed by uv with what pip is configured with, and by pip where that cannot be."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import install  # noqa: E402


def test_a_variable_wins_over_a_file_and_a_command_over_what_is_for_all() -> None:
    said = """:env:.find-links='/env'
    global.find-links='/file'
    global.index-url='https://one/simple'
    install.index-url='https://two/simple'
    download.index-url='https://three/simple'
    """
    assert install.configured(said) == {"find-links": "/env", "index-url": "https://two/simple"}


@pytest.mark.parametrize("line", ["nonsense", "key='value'", "global.key"])
def test_a_line_in_no_known_form_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="which is no section.name='value'"):
        install.configured(line)


def test_every_index_counts_alike_and_none_is_lost() -> None:
    words, variables = install.options(
        {"extra-index-url": "file:///a https://b", "cert": "/c.pem", "timeout": "9", "constraint": "/pins"}
    )
    assert words == [
        "--index-strategy", "unsafe-best-match", "--index", "file:///a", "--index", "https://b",
        "--constraint", "/pins",
    ]  # fmt: skip
    assert variables == {"SSL_CERT_FILE": "/c.pem", "UV_HTTP_TIMEOUT": "9"}


def test_what_uv_cannot_be_told_is_named() -> None:
    with pytest.raises(ValueError, match="no-binary, which uv is not told"):
        install.options({"no-binary": ":all:", "timeout": "9"})


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("1.0", "2.0"):
        about = f"tiny_thing-{version}.dist-info"
        with zipfile.ZipFile(folder / f"tiny_thing-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_thing.py", f"VERSION = {version!r}\n")
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-thing\nVersion: {version}\n"
            )
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return folder


@pytest.mark.parametrize(
    ("more", "said", "by"),
    [
        ({}, "", "uv"),
        ({"INSTALLER": "pip"}, "", "pip"),
        ({"PIP_NO_BINARY": "other"}, "no-binary, which uv is not told; pip installs", "pip"),
    ],
)
def test_the_newest_wheel_that_pip_would_find_is_installed(
    tmp_path: Path, wheels: Path, more: dict[str, str], said: str, by: str
) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("tiny-thing<2\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(wheels), "INSTALLER": "uv"} | more
    words = [sys.executable, str(ROOT / "scripts" / "install.py"), "--no-index", "-c", str(pins)]
    done = subprocess.run(
        [*words, "--target", str(tmp_path / "there"), "tiny-thing"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said in done.stderr
    assert (tmp_path / "there" / "tiny_thing.py").read_text() == "VERSION = '1.0'\n"
    (record,) = (tmp_path / "there").glob("*.dist-info/INSTALLER")
    assert record.read_text().strip() == by


def test_an_index_that_is_named_wins_over_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(list(words))
        return subprocess.CompletedProcess(words, 0, "global.index-url='https://own/simple'\n", "")

    monkeypatch.setattr(install.subprocess, "run", run)
    for named in ([], ["--index-url", "https://cpu"], ["--index-url=https://cpu"], ["-i", "https://cpu"]):
        assert install.by_uv([*named, "torch"]) == ""
        assert ("https://own/simple" in asked[-1]) == (named == [])


def test_pip_says_what_neither_can_install(tmp_path: Path, wheels: Path) -> None:
    environment = os.environ | {"PIP_FIND_LINKS": str(wheels), "INSTALLER": "uv"}
    words = [sys.executable, str(ROOT / "scripts" / "install.py"), "--no-index"]
    done = subprocess.run(
        [*words, "--target", str(tmp_path), "no-such-thing"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "uv ended with 1; pip installs" in done.stderr and "no-such-thing" in done.stderr


def test_an_unknown_installer_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("INSTALLER", "conda")
    assert install.main(["torch"]) == 2
    assert "INSTALLER=conda is neither uv nor pip" in capsys.readouterr().err
