"""One drawing of each part's idea, as SVG that follows the theme's colours and can be read on a phone.

All are 480 units wide with texts of 13 units and more, so that a screen of 390 pixels shows them without
scrolling.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDTH = 480


def text(x: float, y: float, words: str, css: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{css}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *lines: str, css: str = "") -> str:
    """A rounded box with its lines centred; the first line is bold."""
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    words = [
        text(x + width / 2, first + 18 * number, line, "bold" if number == 0 else "small")
        for number, line in enumerate(lines)
    ]
    return f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>{"".join(words)}'


def token(x: float, y: float, word: str, width: float, css: str = "") -> str:
    return f'<rect class="token {css}" x="{x}" y="{y}" width="{width}" height="28" rx="4"/>' + text(
        x + width / 2, y + 19, word, "mono"
    )


def arrow(*points: tuple[float, float], css: str = "") -> str:
    """A line through the points with a head at its end."""
    (x0, y0), (x1, y1) = points[-2:]
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length * 8, (y1 - y0) / length * 8
    path = " ".join(f"{x},{y}" for x, y in points)
    head = f"{x1},{y1} {x1 - dx - dy / 2},{y1 - dy + dx / 2} {x1 - dx + dy / 2},{y1 - dy - dx / 2}"
    return f'<polyline class="wire {css}" points="{path}"/><polygon class="tip {css}" points="{head}"/>'


def bars(x: float, y: float, heights: list[float], css: str) -> str:
    return "".join(
        f'<rect class="bar {css}" x="{x + 13 * n}" y="{y - h}" width="10" height="{h}"/>'
        for n, h in enumerate(heights)
    )


def kernels() -> tuple[int, str, str, str]:
    """One token: two distributions over the vocabulary and three things that push the student's."""
    words = ["get", "call", "the", "end"]
    row = "".join(token(16 + 113 * n, 8, word, 105, "c2" if n == 1 else "") for n, word in enumerate(words))
    return (
        252,
        "What pushes one token",
        (
            "One token of a completion. From the hidden state come log-probabilities over the "
            "vocabulary. Three numbers act "
            "on them: an advantage from the reward, a divergence from the hinted teacher's distribution, "
            "and the margin "
            "between a chosen and a rejected reply. All three become one gradient."
        ),
        "".join(
            [
                row,
                arrow((181, 36), (181, 62)),
                text(120, 78, "student", "small"),
                text(245, 78, "teacher with hint", "small"),
                bars(96, 136, [12, 40, 24, 8], "c1"),
                bars(218, 136, [8, 16, 46, 6], "c2"),
                '<line class="wire" x1="84" x2="290" y1="137" y2="137"/>',
                text(384, 104, "log-probabilities", "small"),
                text(384, 122, "over the vocabulary", "small"),
                box(8, 168, 146, 52, "advantage", "beyond its group", css="c1"),
                box(167, 168, 146, 52, "divergence", "student to hinted", css="c2"),
                box(326, 168, 146, 52, "margin", "chosen over rejected", css="c3"),
                arrow((81, 166), (110, 141), css="c1"),
                arrow((240, 166), (222, 141), css="c2"),
                arrow((399, 166), (275, 141), css="c3"),
                text(240, 243, "three pushes on the same logits, each with its own count", "small"),
            ]
        ),
    )


def data() -> tuple[int, str, str, str]:
    """A rollout with the hint in it: the same tokens are scored in both contexts."""

    def line(y: float, label: str, hint: bool) -> str:
        parts = [("task", 60, ""), ("turn 1", 72, "")] + ([("hint", 58, "c2")] if hint else [])
        parts += [("turn 2", 78, "bad"), ("turn 3", 72, "")]
        x, done = 8 if hint else 8, [text(8, y - 9, label, "small left")]
        for word, width, css in parts:
            done.append(token(x, y, word, width, css))
            x += width + 6
        return "".join(done)

    return (
        236,
        "A rollout with the hint in it",
        (
            "Two rows of the same rollout: task, turn 1, turn 2 with the mistake, turn 3. In the second "
            "row a hint stands right "
            "above turn 2. The sampled tokens of turn 2 are scored in both rows; the divergence between "
            "the two scores trains "
            "the student, on that turn only."
        ),
        "".join(
            [
                line(32, "student: the context as it was", False),
                line(122, "teacher: same model, with hint", True),
                arrow((185, 62), (185, 76), (358, 76)),
                arrow((310, 120), (310, 92), (358, 92)),
                box(362, 56, 112, 52, "divergence", "that turn only", css="c2"),
                text(240, 178, "The mistake's own tokens, as sampled, in two contexts;", "small"),
                text(240, 198, "two lists of positions say which is compared with which.", "small"),
                text(240, 222, "log → states → redaction → hint → batch", "bold"),
            ]
        ),
    )


def replay() -> tuple[int, str, str, str]:
    """trace → states → teachers → pair."""
    return (
        286,
        "From a trace to preference pairs",
        (
            "A recorded trace is cut into states, one for each step of the student. Three teachers are "
            "asked what they would do "
            "in a state; every reply is written to a ledger before it is used. Where enough of them take "
            "the same action and "
            "the student took another, the state gives a pair: consensus chosen, own step rejected."
        ),
        "".join(
            [
                *(
                    token(8 + 93 * n, 8, word, 87, "bad" if n == 2 else "")
                    for n, word in enumerate(["step 1", "step 2", "step 3", "step 4", "step 5"])
                ),
                arrow((237, 36), (237, 56)),
                box(150, 58, 174, 44, "state 3", "what the agent saw"),
                arrow((180, 102), (81, 124)),
                arrow((237, 102), (237, 124)),
                arrow((294, 102), (393, 124)),
                box(16, 126, 130, 44, "teacher A", "read(config)", css="c3"),
                box(172, 126, 130, 44, "teacher B", "read(config)", css="c3"),
                box(328, 126, 130, 44, "teacher C", "search(…)"),
                arrow((81, 170), (170, 208), css="c3"),
                arrow((237, 170), (200, 208), css="c3"),
                box(60, 210, 192, 44, "chosen: read(config)", "two of three agree", css="c3"),
                box(280, 210, 192, 44, "rejected: delete(…)", "what the student did", css="bad"),
                text(240, 276, "one preference pair; every reply is on disk before it is used", "small"),
            ]
        ),
    )


def tasks() -> tuple[int, str, str, str]:
    """A graded attempt: score and error text."""
    return (
        196,
        "A program grades, and says why",
        (
            "The model answers a question with a tool call. A checker compares it argument by argument "
            "with the reference. It "
            "returns a score, which becomes the reward of channel 1, and an error text without the "
            "answer's values, which "
            "becomes the hint of channel 2."
        ),
        "".join(
            [
                box(8, 14, 130, 52, "question", "with its functions"),
                arrow((138, 40), (172, 40)),
                box(174, 14, 130, 52, "model", "writes one call"),
                arrow((304, 40), (338, 40)),
                box(340, 14, 132, 52, "checker", "each argument"),
                arrow((380, 66), (280, 108), css="c1"),
                arrow((420, 66), (404, 108), css="c2"),
                box(150, 110, 150, 52, "score in [0, 1]", "the reward", css="c1"),
                box(318, 110, 154, 52, "error text", "the hint, no values", css="c2"),
                text(240, 186, "the reward says how good, the text says what was wrong", "small"),
            ]
        ),
    )


def training() -> tuple[int, str, str, str]:
    """The trainer's step over time."""
    return (
        262,
        "The trainer's step",
        (
            "A step in five stages. Sample a group of attempts, grade them, write hints at the errors, "
            "run the student forward "
            "once and the hinted teacher forward without gradient, add the three channels and update. A "
            "channel with weight "
            "zero or without inputs leaves no trace in loss or gradient."
        ),
        "".join(
            [
                box(8, 10, 146, 48, "sample", "a group per prompt"),
                arrow((154, 34), (166, 34)),
                box(168, 10, 146, 48, "grade", "reward, error text"),
                arrow((314, 34), (326, 34)),
                box(328, 10, 144, 48, "hint", "above the mistake"),
                arrow((400, 58), (400, 80)),
                box(248, 82, 224, 48, "teacher forward, no grad", "the hinted turn only", css="c2"),
                box(8, 82, 224, 48, "student forward, once", "for channels 1 and 2", css="c1"),
                arrow((81, 58), (81, 80)),
                arrow((120, 130), (190, 158)),
                arrow((360, 130), (290, 158)),
                box(120, 160, 240, 48, "policy + α · hint + β · replay", "each over its own global count"),
                arrow((240, 208), (240, 228)),
                text(240, 248, "one backward, one update; a channel that is off is bit-exact off", "small"),
            ]
        ),
    )


def scaling_out() -> tuple[int, str, str, str]:
    """Replicas and bucket over time, with a death and a return."""

    def life(y: float, name: str, spans: list[tuple[float, float]], css: str) -> str:
        done = [text(8, y + 5, name, "bold left")]
        done += [
            f'<rect class="bar {css}" x="{a}" y="{y - 8}" width="{b - a}" height="16" rx="4"/>'
            for a, b in spans
        ]
        return "".join(done)

    rounds, rows = [150, 285, 420], (28, 68, 108)
    meet = [
        arrow((x - 24 + 12 * n, y + 9), (x - 18 + 9 * n, 170))
        for x in rounds
        for n, y in enumerate(rows)
        if not (x == 285 and n == 2)
    ]
    return (
        250,
        "Replicas and a bucket over time",
        (
            "Three replicas train side by side; time runs to the right. At the end of each round every "
            "replica that is alive "
            "writes its pseudo-gradient to a shared bucket and goes on training; one of them writes the "
            "round's record. The "
            "third replica dies in round 2 and comes back in round 3 with the others' state. No round "
            "waits for it."
        ),
        "".join(
            [
                life(28, "A", [(40, 468)], "c1"),
                life(68, "B", [(40, 468)], "c1"),
                life(108, "C", [(40, 214), (352, 468)], "c3"),
                text(224, 113, "✗", "bold"),
                *meet,
                '<rect class="sum" x="40" y="172" width="428" height="38" rx="7"/>',
                *(text(x - 6, 196, f"round {n}", "mono") for n, x in enumerate(rounds, 1)),
                text(72, 196, "bucket", "bold"),
                text(240, 238, "C is killed and comes back with the others' state", "small"),
            ]
        ),
    )


def launching() -> tuple[int, str, str, str]:
    """One job description, many places, one result."""
    places = ["this machine", "Slurm, Ray", "Kubernetes", "a cloud's jobs"]
    return (
        262,
        "One description, many places",
        (
            "An entry point and a number of replicas go to an executor. The executor starts them on this "
            "machine, on a cluster "
            "or as jobs of a cloud, polls them, and collects from each the exit code, the value or the "
            "error with its log. A "
            "lost replica is seen; nothing of it is left behind."
        ),
        "".join(
            [
                box(140, 8, 200, 48, "what to run", "entry point, n, GPU, timeout"),
                arrow((240, 56), (240, 76)),
                box(140, 78, 200, 38, "executor", css="c1"),
                *(arrow((240, 116), (62 + 119 * n, 140)) for n in range(4)),
                *(box(6 + 118 * n, 142, 112, 38, place) for n, place in enumerate(places)),
                *(arrow((62 + 119 * n, 180), (240 + 12 * (n - 1.5), 204)) for n in range(4)),
                box(
                    80,
                    206,
                    320,
                    44,
                    "rank · exit code · value or error · log",
                    "poll, collect, cancel",
                    css="sum",
                ),
            ]
        ),
    )


def frameworks() -> tuple[int, str, str, str]:
    """Our words on one side, theirs on the other, an adapter that only translates."""
    theirs = ["OpenEnv", "verl", "PRIME-RL", "Monarch"]
    return (
        196,
        "An adapter translates names and nothing else",
        (
            "Losses, alignment and tasks stand in the library. A thin adapter renames them to what another "
            "framework calls them; the framework runs them. Of the four drawn, all but PRIME-RL have a "
            "page."
        ),
        "".join(
            [
                box(4, 66, 148, 56, "composer_nb", "losses, tasks, batch", css="c1"),
                arrow((152, 94), (174, 94)),
                box(176, 66, 130, 56, "adapter", "names, no maths", css="sum"),
                *(arrow((306, 94), (340, 28 + 46 * n)) for n in range(4)),
                *(
                    box(342, 10 + 46 * n, 132, 36, name, css="" if name == "PRIME-RL" else "c3")
                    for n, name in enumerate(theirs)
                ),
            ]
        ),
    )


def spikes() -> tuple[int, str, str, str]:
    """A question, a rule, a run, a verdict."""
    return (
        216,
        "From a question to a verdict",
        (
            "A plan with hypothesis and rule is committed. Then the run is made; its stamp of commit, "
            "versions and hardware, its "
            "figures and series go to metrics.json in a folder that is never overwritten. The rule "
            "computes keep, kill or open "
            "from the figures. Pages and the explorer read the file."
        ),
        "".join(
            [
                box(8, 12, 140, 52, "plan", "hypothesis and rule"),
                arrow((148, 38), (166, 38)),
                box(168, 12, 140, 52, "run", "stamped at its start", css="c1"),
                arrow((308, 38), (326, 38)),
                box(328, 12, 144, 52, "metrics.json", "never overwritten", css="sum"),
                arrow((400, 64), (400, 96)),
                arrow((78, 64), (78, 122), (164, 122)),
                arrow((326, 122), (310, 122)),
                box(328, 98, 144, 48, "figures", "numbers with names"),
                box(168, 98, 140, 48, "rule", "keep · kill · open", css="c3"),
                arrow((238, 146), (238, 168)),
                text(240, 188, "the verdict is computed, also when it is no;", "small"),
                text(240, 208, "a re-run is a new run beside the old one", "small"),
            ]
        ),
    )


DRAWINGS: dict[str, Callable[[], tuple[int, str, str, str]]] = {
    "kernels": kernels,
    "data": data,
    "replay": replay,
    "tasks": tasks,
    "training": training,
    "scaling_out": scaling_out,
    "launching": launching,
    "frameworks": frameworks,
    "spikes": spikes,
}


def svg(name: str) -> str:
    """The drawing with its title and description, for eyes and for screen readers."""
    height, title, description, body = DRAWINGS[name]()
    return (
        f'<figure class="drawing"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{body}</svg></figure>'
    )


class Drawing(SphinxDirective):
    """```{drawing} replay```: the drawing of that name."""

    required_arguments = 1

    def run(self):
        if self.arguments[0] not in DRAWINGS:
            raise self.error(f"no drawing is called {self.arguments[0]!r}; known: {', '.join(DRAWINGS)}")
        return [nodes.raw("", svg(self.arguments[0]), format="html")]


def setup(app) -> None:
    app.add_directive("drawing", Drawing)
