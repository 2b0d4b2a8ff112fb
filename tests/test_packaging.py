"""The wheel: what is in it, and that it runs in an environment without nbdev, fastcore or this checkout.

Names: the distribution is `composer-notebooks`, since `composer-nb` on the package index is somebody else's.
"""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import run_lone  # noqa: E402

BUILT_FROM = ("composer_nb", "pyproject.toml", "LICENSE", "README.md")

PROBE = """
import sys
from importlib.metadata import distributions

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import composer_nb
from composer_nb import compose_loss

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
    assert tops == {"composer_nb", f"composer_notebooks-{declared_version()}.dist-info"}
    assert "composer_nb/py.typed" in names
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names)
    shipped = {n for n in names if n.startswith("composer_nb/") and n.endswith((".py", ".json"))}
    files = [p for end in ("py", "json") for p in (ROOT / "composer_nb").rglob(f"*.{end}")]
    assert shipped == {p.relative_to(ROOT).as_posix() for p in files}


def declared() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared_version() -> str:
    return declared()["version"]


def test_version_is_the_same_everywhere(wheel: Path) -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini")
    init = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "composer_nb" / "__init__.py").read_text(), re.MULTILINE
    )
    assert init is not None
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert {settings["DEFAULT"]["version"], init[1], cited, wheel.name.split("-")[1]} == {declared_version()}


def required(wheel: Path) -> list[str]:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def runtime(wheel: Path) -> set[str]:
    """Names of what the wheel requires without extras."""
    return {re.split(r"[^\w.-]", r)[0].lower() for r in required(wheel) if "extra ==" not in r}


def test_wheel_requires_neither_nbdev_nor_fastcore_to_run(wheel: Path) -> None:
    assert "torch" in runtime(wheel)
    assert runtime(wheel).isdisjoint({"nbdev", "fastcore", "execnb", "jupyter-book", "papermill"})
    assert not any("==" in r for r in required(wheel) if "extra ==" not in r), "loose ranges only"


def test_each_extra_has_what_its_name_says_and_no_more() -> None:
    extras = declared()["optional-dependencies"]
    packages = {name: {re.split(r"[^\w.-]", r)[0].lower() for r in needs} for name, needs in extras.items()}
    assert "py-data-juicer" in packages["normalize"] and "py-data-juicer" not in packages["replay"]
    assert "torchft" in packages["diloco"]
    core = {re.split(r"[^\w.-]", r)[0].lower() for r in declared()["dependencies"]}
    assert {"filelock", "platformdirs", "typer"} <= core
    assert core.isdisjoint({"matplotlib", "pandas", "torchft", "py-data-juicer"})


def test_self_references_name_this_distribution_and_extras_that_exist() -> None:
    extras = declared()["optional-dependencies"]
    named = [r for needs in extras.values() for r in needs if r.lower().startswith("composer")]
    assert named
    for requirement in named:
        distribution, inside = re.fullmatch(r"([\w-]+)\[([\w,]+)\]", requirement).groups()
        assert distribution == declared()["name"] == "composer-notebooks"
        assert set(inside.split(",")) <= extras.keys()


WRONG_INSTALL = re.compile(
    r"(?:pip|uv)3? install[^\n`]*?[\s\"'=](composer[-_]nb)(?![\w-]|\.git|/)", re.IGNORECASE
)
WRONG_VERSION = re.compile(r"(?:version|distribution)\(\s*[\"'](composer[-_]nb)[\"']")
WARNED = "Do not run `pip install composer-nb`"


def printed() -> Iterator[tuple[str, str]]:
    """Everything that a reader is shown: pages, notebooks, the package's messages."""
    for pattern in (
        "*.md",
        "book/*.md",
        "composer_nb/**/*.py",
        "scripts/*.py",
        "spikes/*.py",
        ".github/**/*.yml",
    ):
        for path in ROOT.glob(pattern):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for pattern in ("nbs/*/*.ipynb", "spikes/*/*.ipynb"):
        for path in ROOT.glob(pattern):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            yield path.relative_to(ROOT).as_posix(), "\n".join("".join(cell["source"]) for cell in cells)


def test_every_printed_install_names_this_distribution() -> None:
    found = [
        f"{name}: {line.strip()}"
        for name, text in printed()
        for line in text.splitlines()
        if (WRONG_INSTALL.search(line) or WRONG_VERSION.search(line)) and WARNED not in line
    ]
    assert not found, "composer-nb on the index is somebody else's:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "pip install composer_nb",
        'run pip install "composer_nb[replay]"',
        "pip install -U 'composer-nb[diloco]'",
    ],
)
def test_a_wrong_install_would_be_found(line: str) -> None:
    assert WRONG_INSTALL.search(line)


def test_right_installs_are_left_alone() -> None:
    for line in (
        'pip install "composer-notebooks[replay]"',
        "composer-nb wheelhouse out",
        "git clone x/composer_nb",
    ):
        assert not WRONG_INSTALL.search(line)


# --- what an import brings -------------------------------------------------------------------------

FORBID = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{name}} was imported")

sys.meta_path.insert(0, Forbidden())
"""


def import_without(names: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    source = FORBID.format(names=names) + code
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "import composer_nb",
        "import composer_nb.redaction",
        "from composer_nb import ClaudeCodeIngester, TraceState",
        "import composer_nb.traces",
        "import composer_nb.cli",
    ],
)
def test_importable_without_torch(code: str) -> None:
    done = import_without(("torch", "transformers"), code)
    assert done.returncode == 0, done.stderr


def test_the_hook_forbids_torch() -> None:
    done = import_without(("torch",), "import composer_nb.core")
    assert done.returncode != 0 and "torch was imported" in done.stderr


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when a module is imported: everything outside functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)


def test_no_module_imports_what_only_extras_have() -> None:
    """Extras are imported where they are used; a module that needs one to be imported would break the core
    install.
    """
    optional = {
        "matplotlib",
        "pandas",
        "torchft",
        "zstandard",
        "s3fs",
        "data_juicer",
        "moto",
        "peft",
        "kingfisher_sdk",
    }
    found = []
    for path in sorted((ROOT / "composer_nb").rglob("*.py")):
        if "drills" in path.parts:  # by name what chapters practise on
            continue
        for node in at_import(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{path.relative_to(ROOT)}: {n}" for n in names if n.split(".")[0] in optional]
    assert not found


# --- the package's own names -----------------------------------------------------------------------


def test_every_public_name_is_where_the_table_says() -> None:
    import composer_nb

    missing = [name for name in composer_nb.__all__ if not hasattr(composer_nb, name)]
    assert not missing
    assert "compose_loss" in dir(composer_nb)


def test_type_checkers_read_the_same_table() -> None:
    import composer_nb

    tree = ast.parse((ROOT / "composer_nb" / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    shown = {node.module: tuple(sorted(a.name for a in node.names)) for node in guarded.body}
    assert shown == {module: tuple(sorted(names)) for module, names in composer_nb._MODULES.items()}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import composer_nb

    with pytest.raises(AttributeError, match="no_such_name"):
        composer_nb.no_such_name  # noqa: B018


# --- release and containers ------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_container_and_devcontainer_build_with_targets_that_exist() -> None:
    docker = (ROOT / "Dockerfile").read_text()
    dev = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    said = docker.replace('["make", "test"]', "make test") + "\n" + dev["postCreateCommand"]
    asked = set(re.findall(r"(?:^|^RUN |^CMD |&& )make ([a-z][a-z-]*)", said, re.MULTILINE))
    assert {"quickstart", "test"} <= asked <= make_targets()
    words = {line.split()[0] for line in docker.splitlines() if re.match(r"[A-Z]+ ", line)}
    assert words <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "CMD"}


def test_workflows_and_templates_parse_and_name_files_that_exist() -> None:
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert {"ci.yml", "gpu.yml", "release.yml", "bug.yml"} <= {f.name for f in files}
    for file in files:
        assert yaml.safe_load(file.read_text()), file
        for script in re.findall(r"(?:python|run:) ((?:scripts|spikes|\.ci)/[\w./]+)", file.read_text()):
            assert (ROOT / script).exists(), f"{file.name}: {script}"


def test_a_release_publishes_what_the_build_makes() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    flow = yaml.safe_load(text)
    assert flow[True]["push"]["tags"] == ["v*"]  # YAML reads the word `on` as a truth value
    assert f"dist/{declared()['name'].replace('-', '_')}-*.tar.gz" in text


@pytest.fixture
def release_notes():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import release_notes
    finally:
        sys.path.pop(0)
    return release_notes


def test_notes_of_a_release_are_its_section(release_notes) -> None:
    changelog = "# Changelog\n\n## [1.1.0] - 2027-02-01\n\n### Added\n- b\n\n## [1.0.0] - 2027-01-01\n- a\n"
    assert release_notes.section(changelog, "1.1.0") == "### Added\n- b"
    assert release_notes.section(changelog, "1.0.0") == "- a"


@pytest.mark.parametrize(
    ("changelog", "said"),
    [
        ("## [1.0.0] - 2027-01-01\n- a\n", "no section"),
        ("## [1.1.0] - Unreleased\n- a\n", "has no date"),
        ("## [1.1.0] - 2027-01-01\n\n## [1.0.0] - 2027-01-01\n- a\n", "no section"),
    ],
)
def test_a_tag_without_its_section_is_refused(release_notes, changelog: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        release_notes.section(changelog, "1.1.0")


def test_a_tag_that_is_not_the_version_is_refused(release_notes) -> None:
    with pytest.raises(ValueError, match="does not match version"):
        release_notes.notes("v99.0.0")


@pytest.mark.slow
def test_wheel_runs_the_loss_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """On Python 3.11 the environment has links to what the wheel requires, in the versions that CI proves,
    and nothing else of ours; on other Pythons the loose ranges are what is tested, from the index.
    """
    linked = sys.version_info[:2] == (3, 11)
    home = tmp_path / "venv"
    if linked:
        base = run_lone.link_base(tmp_path / "links", [*runtime(wheel), "pip"])
        run_lone.Environments(tmp_path, sys.executable, base).get(home.name)
    else:
        venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    probe = [python, "-I", "-c", PROBE]
    try:
        if linked:
            with pytest.raises(AssertionError, match="No module named 'composer_nb'"):
                run(*probe, cwd=tmp_path)
            run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
        else:
            run(*pip, *torch_index(), "torch", cwd=tmp_path)
            run(*pip, wheel, cwd=tmp_path)
        assert run(*probe, cwd=tmp_path).startswith("loss ")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def torch_index() -> list[str]:
    """The pip option the Makefile installs torch with."""
    return os.environ.get("TORCH_INDEX", "").split()
