"""The streamed divergence as it is, with its elementwise part compiled, and the bare products, in turn:
`python compiled.py '{"N": 512, "V": 49152, "d": 576, …}'` prints a line of JSON.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from composer_nb.distillation import fused
from composer_nb.distillation.fused import Head, Step, View, fused_divergence_loss


def formula(s: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`divergence_rows` for 0 < beta < 1 without its scratch: value and factor, (rows, 1) each; `s` becomes
    the gradient but for that factor.
    """
    log2 = math.log2(beta / (1 - beta))
    s_low, t_low = s - s.amax(-1, keepdim=True), t - t.amax(-1, keepdim=True)
    S, T = torch.exp2(s_low), torch.exp2(t_low)
    sum_s, sum_t = S.sum(-1, keepdim=True), T.sum(-1, keepdim=True)
    odds = (t_low - s_low + (sum_s.log2() - sum_t.log2() + log2)).clamp(max=126.0)
    L = torch.log1p(torch.exp2(odds))
    inner = (S * L).sum(-1, keepdim=True) / sum_s
    reverse = (T * (odds - L / math.log(2))).sum(-1, keepdim=True) / sum_t
    s.copy_(S * (inner - L))
    value = -(1 - beta) * (math.log1p(-beta) + inner) + beta * (math.log(2) * reverse - math.log(beta))
    return value, (1 - beta) / sum_s


def stream_of(rows: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Step]:
    """`divergence_step` that hands a whole chunk to `rows`."""

    def step(beta: float, temperature: float = 1.0, *others: object) -> Step:
        def run(s: Tensor, t: Tensor, _: slice) -> tuple[Tensor, Tensor]:
            values, factor = rows(s, t, beta)
            return values.sum(), factor / temperature

        return Step(run, 1.0 / (math.log(2) * temperature))

    return step


def products(student: Tensor, teacher: Tensor, weight: Tensor, room: Tensor) -> list[Tensor]:
    """The four products that any exact method needs."""
    torch.mm(student, weight.t(), out=room)
    torch.mm(teacher, weight.t(), out=room)
    return [room @ weight, room.t() @ student]


def measure(spec: dict) -> dict:
    """Seconds of each, turn by turn, what compiling took, and how far the gradients are apart."""
    generator = torch.Generator().manual_seed(spec["seed"])
    N, V, d = spec["N"], spec["V"], spec["d"]
    student, teacher = (torch.randn(N, d, generator=generator) for _ in range(2))
    weight = 3 * torch.randn(V, d, generator=generator) / d**0.5
    student.requires_grad_(), weight.requires_grad_()
    eager, compiled = fused.divergence_step, torch.compile(formula, dynamic=True) if spec["compile"] else formula
    steps = {"eager": eager, "compiled": stream_of(compiled)}
    room = torch.empty(N, V)

    def call(name: str) -> list[Tensor]:
        if name == "floor":
            return products(student.detach(), teacher, weight.detach(), room)
        student.grad = weight.grad = None
        fused.divergence_step = steps[name]
        head = Head(weight)
        fused_divergence_loss(View(student, head), View(teacher, head), beta=spec["beta"]).backward()
        fused.divergence_step = eager
        return [student.grad, weight.grad]

    def seconds(name: str) -> float:
        start = time.perf_counter()
        call(name)
        return time.perf_counter() - start

    first = {name: seconds(name) for name in ("floor", *steps)}
    plain, other = call("eager"), call("compiled")
    apart = max(float((a - b).norm() / a.norm()) for a, b in zip(plain, other, strict=True))
    turns: dict[str, list[float]] = {name: [] for name in first}
    for _ in range(spec["repeats"]):
        for name, taken in turns.items():
            taken.append(seconds(name))
    usual = statistics.median(turns["compiled"])
    return {"turns": turns, "gradient_difference": apart, "compile_s": max(0.0, first["compiled"] - usual)}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
