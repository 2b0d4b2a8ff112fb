"""A small book with every construct the real one uses, and every trap met so far."""

from __future__ import annotations

import io
import json
import re
import shutil
from base64 import b64decode, b64encode
from pathlib import Path

import matplotlib
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
SPIKE = "006_real_model_cpu"
RUN, FIRST_RUN = f"spikes/{SPIKE}/runs/cold-cpu", f"spikes/{SPIKE}/runs/first-cpu"
METRICS = {
    "spike": SPIKE,
    "run": "cold-cpu",
    "params": {"seed": 7, "arms": "composer,grpo"},
    "seeds": [7],
    "commit": "0123abc",
    "hardware": {"cpu": "2 cores"},
    "started": "2026-11-20T10:00:00+00:00",
    "wall_s": 41.5,
    "figures": {"heldout_before": 0.125, "heldout_after": 0.4375},
    "series": {"loss": [2.0, 1.5], "reward_composer": [0.1, 0.3, 0.2], "reward_grpo": [0.1, 0.0, 0.1]},
    "verdict": "keep",
    "notes": "",
    "provenance": "commit: made again on a clean commit",
    "supersedes": "first-cpu",
}
FIRST_METRICS = METRICS | {
    "run": "first-cpu",
    "seeds": [1],
    "commit": "fedcba9+",
    "verdict": "kill",
    "supersedes": None,
    "provenance": "commit: the tree was dirty",
    "started": "2026-11-19T09:00:00+00:00",
}
STANDING = (
    f"{SPIKE}:\n  runs: [first-cpu]\n  standing: withdrawn\n  since: 2026-11-20\n"
    "  why: The arms were swapped.\n"
)
HOUSE = {
    "modules_over_400": 2,
    "hidden_uses": 0,
    "lone_chapters": 5,
    "lone_chapters_run": 4,
    "function_median": 6,
}
PACKAGE = '''"""Masks and means, for the sample."""

__all__ = ["LIMIT", "Mode", "masked_mean", "Meter"]

from dataclasses import dataclass

LIMIT = 3  # rows at a time


Mode = Other = "mean"


def masked_mean(
    x: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, floor: int = 1
) -> Float[Tensor, ""]:
    """Mean of `x` where `mask` is true; costs 3 USD and <nothing>.

    - first [item]
    - second
    """
    if x.shape != mask.shape:
        raise ValueError(f"x {tuple(x.shape)} and mask disagree")
    return (x * mask).sum() / mask.sum().clamp(min=floor)


@dataclass
class Meter:
    """Counts."""

    count: int = 0  # tokens so far
    _secret: int = 0

    @property
    def half(self) -> float:
        "Half of it."
        return self.count / 2

    def add(self, n: int) -> "Meter":
        "Add `n`."
        return self
'''
PANDAS = (
    '<style scoped>.dataframe td {text-align: right;}</style><table border="1" class="dataframe"><thead><tr>'
    "<th></th><th>upstream</th><th>largest difference</th></tr></thead><tbody><tr><th>0</th><td>verl</td>"
    "<td>0.0</td></tr><tr><th>1</th><td>TRL</td><td>1.2e-07</td></tr></tbody></table>"
)


def plot_png() -> str:
    figure, axes = plt.subplots(figsize=(5, 3))
    axes.plot([1, 2, 3], [2.0, 1.5, 1.1], marker="o")
    axes.set(xlabel="step", ylabel="loss", title="Loss falls")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    plt.close(figure)
    return b64encode(buffer.getvalue()).decode()


def ran(source: str, *outputs) -> dict:
    return new_code_cell(source, execution_count=1, outputs=list(outputs))


def chapter() -> nbformat.NotebookNode:
    shown = {"text/markdown": "---\n\n### masked_mean\n\n> masked_mean (x, mask)\n\n*Mean over the mask.*"}
    return new_notebook(
        cells=[
            ran("#| default_exp core"),
            new_markdown_cell(
                "# Masks and log-probabilities\n\n> The floor everything stands on.\n\n"
                "Ten minutes, any CPU. Read nothing first.\n\n"
                "[Open in Colab](https://colab.research.google.com/github/"
                "composer-nb/composer_nb/blob/main/nbs/00_core.ipynb)"
            ),
            new_markdown_cell(
                ':::{admonition} Evidence\n:class: evidence\n\n**Cursor says** "for that turn only".\n:::'
            ),
            new_markdown_cell("<!-- roadmap -->"),
            ran("#| hide\nsecret_setup = 1", new_output("stream", text="hidden output\n")),
            new_markdown_cell(
                "## The masked mean\n\nWith a mask $m_t \\in \\{0, 1\\}$ and \\(N = \\sum_t m_t\\):\n\n"
                "$$\n\\bar{x} = \\frac{1}{N} \\sum_t m_t\\, x_t, \\qquad \\boldsymbol{x} \\in "
                "\\mathbb{R}^T\n$$\n\n"
                "| symbol | variable | shape |\n|---|---|---|\n| $x_t$ | `x` | `(batch, time)` |\n| "
                "$m_t$ | `mask` | `(batch, time)` |\n\n"
                "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}\n\nNext: "
                "[advantages](01_policy.ipynb) and [their clip](01_policy.ipynb#the-clip)."
            ),
            ran(
                "#| export\nimport torch\n\n\ndef masked_mean(x: torch.Tensor, mask: torch.Tensor) -> "
                "torch.Tensor:\n"
                '    """Mean of `x` where `mask` is true."""\n    return (x * mask).sum() / '
                "mask.sum().clamp(min=1)"
            ),
            ran("#| echo: false\nshow_doc(masked_mean)", new_output("display_data", shown)),
            ran("display(doc)", new_output("display_data", shown)),
            ran(
                "x = torch.tensor([1.0, 2.0, 4.0])\nmasked_mean(x, x > 1)",
                new_output("execute_result", {"text/plain": "tensor(3.)"}, execution_count=1),
            ),
            ran(
                "for step in tqdm(range(3)):\n    pass",
                new_output("stream", name="stderr", text="\r  0%|          | 0/3\r100%|###| 3/3\n"),
                new_output("stream", text="1%\r50%\rdone\n"),
                new_output(
                    "display_data",
                    {
                        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
                        "text/plain": "  0%| | 0/3",
                    },
                ),
            ),
            ran(
                "plt.plot(losses)",
                new_output("display_data", {"image/png": plot_png(), "text/plain": "<Figure>"}),
            ),
            ran(
                "table",
                new_output("execute_result", {"text/html": PANDAS, "text/plain": "table"}, execution_count=1),
            ),
            new_code_cell("#| eval: false\nPath('executed.txt').write_text('a build must not run this')"),
            new_code_cell("#| gpu\n#| slow\nPath('executed.txt').write_text('nor this')"),
            new_code_cell("Path('executed.txt').write_text('nor this')"),
            new_markdown_cell(
                "## Measured\n\nHeld-out accuracy went from "
                "{metric}`006_real_model_cpu/runs/cold-cpu:heldout_before:.3f` to "
                "{metric}`006_real_model_cpu/runs/cold-cpu:heldout_after:.3f` (seed "
                "{metric}`006_real_model_cpu/runs/cold-cpu:params.seed`), "
                "after {cite}`dpo`. See [the run](../spikes/006_real_model_cpu/runs/cold-cpu/spike.ipynb)."
            ),
        ]
    )


def second_chapter() -> nbformat.NotebookNode:
    return new_notebook(
        cells=[
            new_markdown_cell(
                "# Advantages\n\n> One number per attempt.\n\n<!-- roadmap -->\n\n"
                "## The clip\n\nBack to [masks](00_core.ipynb). The ratio is $r_t = \\pi/\\pi_\\text{old}$."
            ),
            ran("1 + 1", new_output("execute_result", {"text/plain": "2"}, execution_count=1)),
        ]
    )


def spike() -> nbformat.NotebookNode:
    return new_notebook(
        cells=[
            new_markdown_cell("# Does the step train a real model?\n\n## Rule\n\nKeep if it rises."),
            ran("print('run')", new_output("stream", text="run\n")),
        ]
    )


def write_runs(root: Path) -> None:
    """Two runs of one spike; the second takes the place of the first."""
    for run, metrics in ((RUN, METRICS), (FIRST_RUN, FIRST_METRICS)):
        (root / run).mkdir(parents=True, exist_ok=True)
        (root / run / "metrics.json").write_text(json.dumps(metrics))
        (root / run / "plot.png").write_bytes(b64decode(plot_png()))
    (root / "book/standing.yml").write_text(STANDING)
    (root / "book/house.json").write_text(json.dumps(HOUSE))


def write_sample_book(root: Path) -> Path:
    """The project's own config, extension and front matter, with sample notebooks in place of the
    chapters."""
    shutil.copy(ROOT / "_config.yml", root / "_config.yml")
    front = (ROOT / "intro.md").read_text()  # without what it reads from runs that are not in the sample
    front = re.sub(r"```\{curve-plot\}.*?```\n", "", front, flags=re.DOTALL)
    named = re.compile(r"(```\{newest-verdicts\}\n)(?:\w+: .+\n)+")
    front = named.sub(lambda found: f"{found[1]}{SPIKE}: Does it train?\n", front)
    front = re.sub(r"\[([^]]*)\]\(spikes/\d[^)]*\)", r"\1", front)
    (root / "intro.md").write_text(re.sub(r"\{metric\}`[^`]*`", "a figure", front))
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("__pycache__", "api"))
    (root / "book/claims.md").write_text(
        "# Claims\n\nThe sample claims nothing, and says so in a sentence.\n"
    )
    (root / "book/which_channel.md").write_text(
        "# Which channel\n\nThe sample has no runs to decide by, and says so.\n"
    )
    (root / "book/results.md").write_text(
        "# Results\n\nThe sample has no comparisons to draw, and says so.\n"
    )
    (root / "book/composer_map.md").write_text(
        "# Map\n\n> What was published, part by part.\n\nSee {chapter}`core`.\n"
    )
    pages = {
        "nbs/00_core": chapter(),
        "nbs/01_policy": second_chapter(),
        f"{RUN}/spike": spike(),
        f"{FIRST_RUN}/spike": spike(),
        f"spikes/{SPIKE}/spike": spike(),
    }
    for page, notebook in pages.items():
        path = root / f"{page}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)
    write_runs(root)
    (root / "composer_nb").mkdir()
    (root / "composer_nb/core.py").write_text(PACKAGE)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: intro\nparts:\n"
        "  - caption: Kernels\n    chapters: [{file: book/parts/kernels}, {file: nbs/00_core}, "
        "{file: nbs/01_policy}]\n"
        "  - caption: Spikes\n    chapters:\n      - file: book/results\n      - file: book/explorer\n"
        f"      - file: spikes/{SPIKE}/spike\n"
        f"        sections: [{{glob: spikes/{SPIKE}/runs/*/spike}}]\n"
        "  - caption: About\n    chapters: [{file: book/which_channel}, {file: book/status}, "
        "{file: book/claims}, {file: book/composer_map}, {file: book/glossary},\n"
        "               {file: book/api/index, sections: [{glob: book/api/part_*}]}, "
        "{file: book/references}]\n"
    )
    return root
