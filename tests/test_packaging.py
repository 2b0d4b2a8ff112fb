"""The wheel: what is in it, and that it runs in an environment without nbdev, fastcore or this checkout."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("composer_nb", "pyproject.toml", "LICENSE", "README.md")

PROBE = """
import sys
from importlib.metadata import distributions

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import composer_nb
from composer_nb.loss import compose_loss

torch.manual_seed(0)
sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
tokens = torch.randint(0, 61, (2, 12))
mask = torch.ones_like(tokens)
mask[:, :4] = 0
batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "response_mask": mask}
result = compose_loss(model, batch, alpha_sdpo=0.0, beta_replay=0.0)
assert torch.isfinite(result.total), result
result.total.backward()
assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())

imported = {"nbdev", "fastcore", "execnb"} & set(sys.modules)
assert not imported, f"imported at run time: {imported}"
installed = {d.metadata["Name"].lower() for d in distributions()} & {"nbdev", "fastcore", "execnb"}
assert not installed, f"installed by the wheel: {installed}"
assert "site-packages" in composer_nb.__file__, composer_nb.__file__
print("loss", float(result.total), "version", composer_nb.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; its output is the assertion message when it fails."""
    # Neither this checkout nor this environment may lend the new one its packages.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build folder appears in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, source / name)
    for stray in ("tests", "nbs", "spikes", "scripts"):
        (source / stray).mkdir()
        (source / stray / "__init__.py").touch()
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_package_its_licence_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"composer_nb", f"composer_nb-{declared_version()}.dist-info"}
    assert "composer_nb/py.typed" in names
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names)
    shipped = {n for n in names if n.startswith("composer_nb/") and n.endswith(".py")}
    assert shipped == {p.relative_to(ROOT).as_posix() for p in (ROOT / "composer_nb").rglob("*.py")}


def declared_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_version_is_the_same_everywhere(wheel: Path) -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini")
    init = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "composer_nb" / "__init__.py").read_text(), re.MULTILINE
    )
    assert init is not None
    assert {settings["DEFAULT"]["version"], init[1], wheel.name.split("-")[1]} == {declared_version()}


def test_wheel_requires_neither_nbdev_nor_fastcore_to_run(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    runtime = {
        re.split(r"[^\w.-]", r)[0].lower()
        for r in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in r
    }
    assert "torch" in runtime
    assert runtime.isdisjoint({"nbdev", "fastcore", "execnb", "jupyter-book", "papermill"})
    assert not any("==" in r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r), (
        "loose ranges only"
    )


@pytest.mark.slow
def test_wheel_runs_the_loss_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    try:
        # The versions CI proves; on other Pythons the loose ranges are what is tested.
        pins = ["-c", ROOT / "constraints.txt"] if sys.version_info[:2] == (3, 11) else []
        run(*pip, *pins, *torch_index(), "torch", cwd=tmp_path)
        run(*pip, *pins, wheel, cwd=tmp_path)
        assert run(python, "-I", "-c", PROBE, cwd=tmp_path).startswith("loss ")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def torch_index() -> list[str]:
    """The pip option the Makefile installs torch with."""
    return os.environ.get("TORCH_INDEX", "").split()
