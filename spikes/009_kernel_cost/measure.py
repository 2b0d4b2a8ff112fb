"""One measurement in one process: `python measure.py '{"case": "trl", "N": 2048, "V": 32000, "d": 576,
...}'` prints a line of JSON.

Memory is the peak of the resident set (CPU) or of the allocator (GPU) above what was held before the
case's first full call, so page faults and scratch count; `returned_mib` is the part of it that are the
gradients themselves. Time: the case and the streamed loss take turns, `repeats` times each, so that a
machine that speeds up or slows down does so for both; `ratios` are streamed loss over case, turn by turn.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from composer_nb.distillation.fused import _BLOCK, Head, View, chunk_rows, fused_divergence_loss

MIB = 2**20


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak) of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def tensors(spec: dict) -> dict:
    """Hidden states, heads and the rows that are scored; the teacher's head is the student's, as in
    self-distillation.
    """
    kind, device = getattr(torch, spec["dtype"]), spec["device"]
    generator = torch.Generator(device).manual_seed(spec["seed"])
    N, V, d = spec["N"], spec["V"], spec["d"]
    student, teacher = (torch.randn(N, d, generator=generator, device=device).to(kind) for _ in range(2))
    weight = (3 * torch.randn(V, d, generator=generator, device=device) / d**0.5).to(kind)
    scored = torch.zeros(N, dtype=torch.bool, device=device)
    scored[:: spec["every"]] = True
    return {
        "student": student.requires_grad_(),
        "teacher": teacher,
        "weight": weight.requires_grad_(),
        "scored": scored,
    }


def ours(x: dict, beta: float) -> None:
    head = Head(x["weight"])
    fused_divergence_loss(
        View(x["student"][x["scored"]], head), View(x["teacher"][x["scored"]], head), beta=beta
    ).backward()


def eager(x: dict, beta: float) -> None:
    """The streamed loss without its kernel, for a GPU: the passes over a chunk are PyTorch's own."""
    head = Head(x["weight"])
    student, teacher = (View(x[side][x["scored"]], head) for side in ("student", "teacher"))
    fused_divergence_loss(student, teacher, beta=beta, kernel=False).backward()


def trl(x: dict, beta: float) -> None:
    from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

    student = F.linear(x["student"], x["weight"])
    with torch.no_grad():
        teacher = F.linear(x["teacher"], x["weight"])
    per_token = compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=beta)
    ((per_token * x["scored"]).sum() / x["scored"].sum()).backward()


def liger(x: dict, beta: float) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    target = torch.where(x["scored"], 0, -100)
    loss(x["student"], x["weight"], x["teacher"], x["weight"].detach(), target).backward()


def autograd(x: dict, beta: float) -> None:
    """The formula on gathered rows, gradient by autograd, all logits at once."""
    s = F.linear(x["student"][x["scored"]], x["weight"]).float().log_softmax(-1)
    with torch.no_grad():
        t = F.linear(x["teacher"][x["scored"]], x["weight"]).float().log_softmax(-1)
    m = torch.log((1 - beta) * s.exp() + beta * t.exp())
    ((1 - beta) * s.exp() * (s - m) + beta * t.exp() * (t - m)).sum(-1).mean().backward()


def floor(x: dict, beta: float) -> None:
    """The four matrix products that any exact method needs: logits into memory that is already there,
    gradients into their own.
    """
    student, teacher, weight = (
        x["student"].detach()[x["scored"]],
        x["teacher"][x["scored"]],
        x["weight"].detach(),
    )
    logits = x.setdefault("room", weight.new_empty(0)).resize_(len(student), len(weight))
    torch.mm(student, weight.t(), out=logits)
    torch.mm(teacher, weight.t(), out=logits)
    x["gradients"] = None
    x["gradients"] = logits @ weight, logits.t() @ student


def bound(x: dict, beta: float) -> None:
    """The products, a few rows at a time as the streamed loss takes them, and on blocks that stay in the
    cache one call for each function that the formula has: 2^z and its sum on both sides, 2^z and log1p for the
    odds, one product. No maximum, no difference, no value: less than any exact method in PyTorch can do with.
    """
    rows = [x[side].detach()[x["scored"]] for side in ("student", "teacher")]
    weight, count = x["weight"].detach(), len(rows[0])
    if weight.is_cuda:
        return bound_on_gpu(*rows, weight)
    height = chunk_rows(count, len(weight))
    room, block = weight.new_empty(2 * height, len(weight)), max(1, _BLOCK // len(weight))
    powers = weight.new_empty(2, block, len(weight))
    hidden, total = torch.empty_like(rows[0]), torch.empty_like(weight)
    for top in range(0, count, height):
        part = [side[top : top + height] for side in rows]
        logits = torch.mm(torch.cat(part), weight.t(), out=room[: 2 * len(part[0])])
        for first in range(0, len(part[0]), block):
            s, t = (half[first : first + block] for half in logits.chunk(2))
            S, T = powers[:, : len(s)]
            torch.exp2(s, out=S).sum(-1)
            torch.exp2(t, out=T).sum(-1)
            torch.mul(S, torch.exp2(t, out=T).log1p_(), out=s)
        torch.mm(logits[: len(part[0])], weight, out=hidden[top : top + height])
        total.addmm_(logits[: len(part[0])].t(), part[0], beta=float(top > 0))


def bound_on_gpu(student: torch.Tensor, teacher: torch.Tensor, weight: torch.Tensor) -> None:
    """The products, with fp32 logits and in chunks as the streamed loss has them, and plain copies that move as
    many bytes as its kernel does, 28 an entry; of 16 bits the gradient is rounded once.
    """
    height, kind = chunk_rows(len(student), len(weight), "cuda"), weight.dtype
    wide = {} if kind == torch.float32 else {"out_dtype": torch.float32}
    room = torch.empty(2 * height, len(weight), device=weight.device)
    spare, hidden = torch.empty_like(room), torch.empty_like(student, dtype=torch.float32)
    total = torch.empty(weight.shape, device=weight.device)
    for top in range(0, len(student), height):
        part = student[top : top + height]
        both = torch.mm(torch.cat([part, teacher[top : top + height]]), weight.t(), out=room[: 2 * len(part)], **wide)
        logits = both[: len(part)]
        spare[: 2 * len(part)].copy_(both)  # 16 bytes an entry of the student's
        spare[: len(part)].copy_(logits)  # 8
        spare[: len(part) // 2].copy_(logits[: len(part) // 2])  # 4
        gradient = logits.to(kind)
        torch.mm(gradient, weight, out=hidden[top : top + height], **wide)
        if top:
            torch.addmm(total, gradient.t(), part, out=total, **wide)
        else:
            torch.mm(gradient.t(), part, out=total, **wide)


CASES = {"ours": ours, "eager": eager, "trl": trl, "liger": liger, "autograd": autograd, "floor": floor, "bound": bound}


def cost(spec: dict) -> dict:
    """Seconds and peak extra memory of one case."""
    x = tensors(spec)
    cuda = spec["device"] == "cuda"
    torch.mm(
        torch.ones(64, 64, device=spec["device"]), torch.ones(64, 64, device=spec["device"])
    )  # the library's own workspace
    CASES[spec["case"]](
        {k: v[:8].detach().requires_grad_(v.requires_grad) for k, v in x.items()}
        if spec["case"] not in ("floor", "bound")
        else dict(x),
        0.5,
    )
    x["student"].grad = x["weight"].grad = None
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
    CASES[spec["case"]](x, spec["beta"])
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    returned = sum(
        g.numel() * g.element_size() for g in (x["student"].grad, x["weight"].grad) if g is not None
    )
    turns = {spec["case"]: [], "ours": []}
    for turn in range(spec["repeats"] * len(turns)):
        name = list(turns)[turn % len(turns)]
        x["student"].grad = x["weight"].grad = None
        x.pop("gradients", None)
        start = time.perf_counter()
        CASES[name](x, spec["beta"])
        if cuda:
            torch.cuda.synchronize()
        turns[name].append(time.perf_counter() - start)
    ratios = [mine / theirs for mine, theirs in zip(turns["ours"], turns[spec["case"]], strict=True)]
    return {
        "seconds": min(turns[spec["case"]]),
        "ratios": ratios,
        "peak_mib": (peak - before) / MIB,
        "returned_mib": returned / MIB,
    }


def error(spec: dict) -> dict:
    """Relative error of both gradients against float64, all taken from the same rounded inputs."""
    x = tensors(spec)
    exact = {
        k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for k, v in x.items()
    }
    head = Head(exact["weight"])
    s, t = (head(exact[name][x["scored"]]).log_softmax(-1) for name in ("student", "teacher"))
    t, beta = t.detach(), spec["beta"]
    m = torch.log((1 - beta) * s.exp() + beta * t.exp())
    ((1 - beta) * s.exp() * (s - m) + beta * t.exp() * (t - m)).sum(-1).mean().backward()
    CASES[spec["case"]](x, beta)
    return {
        name: ((x[name].grad.double() - exact[name].grad).norm() / exact[name].grad.norm()).item()
        for name in ("student", "weight")
    }


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    torch.manual_seed(request["seed"])
    print(json.dumps(error(request) if request.get("error") else cost(request)))
