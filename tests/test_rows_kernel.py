"""One kernel makes value and gradient of a block of logits: on a GPU where there is one, else in Triton's
interpreter, which runs the same source.
"""

import math
from unittest import mock

import pytest
import torch

from composer_nb.distillation import fused
from composer_nb.distillation.divergence import generalized_jsd_loss
from composer_nb.distillation.fused import (
    Head,
    View,
    autograd_step,
    chunk_rows,
    divergence_step,
    fused_divergence_loss,
    runs_kernel,
)
from composer_nb.distillation.rows_kernel import kernel_rows
from composer_nb.loss import LossConfig, distillation_channel, streamed_distillation

ON = "cuda" if torch.cuda.is_available() else "cpu"

BETAS = [0.0, 1e-5, 0.01, 0.3, 0.5, 0.99, 0.9999, 1.0]


def drawn(*shape, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator)).to(ON)


def exact(s, t, beta, temperature=1.0):
    """Values of rows, and the gradient of their sum, in float64."""
    z = s.double().requires_grad_()
    rows = [
        generalized_jsd_loss(
            z[None, i : i + 1], t.double()[None, i : i + 1], beta=beta, temperature=temperature
        )
        for i in range(len(s))
    ]
    values = torch.stack(rows)
    return values.detach(), torch.autograd.grad(values.sum(), z)[0]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("width, spread", [(1, 1.0), (3, 1.0), (64, 5.0), (2049, 3.0), (5000, 15.0)])
def test_value_and_gradient_of_the_reference(beta, width, spread):
    s, t = drawn(4, width, spread=spread), drawn(4, width, seed=1, spread=spread)
    wanted, gradient = exact(s, t, beta, temperature=1.7)
    gain = torch.full((4, 1), 1 / 1.7, device=ON)
    values = kernel_rows(s, t.clone(), beta, 1 / (1.7 * math.log(2)), gain)
    assert torch.allclose(values.flatten().double(), wanted, atol=2e-6, rtol=1e-5)
    if width == 1:
        assert s.abs().max() == 0
    else:
        assert relative(s, gradient) < 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gain_and_cap_reach_the_gradient(beta):
    s, t = drawn(5, 40, spread=2.0), drawn(5, 40, seed=1, spread=2.0)
    unit, one = 1 / math.log(2), torch.ones(5, 1, device=ON)
    plain = s.clone()
    values = kernel_rows(plain, t, beta, unit, one)
    gain = torch.arange(5.0, device=ON).unsqueeze(1)
    cap = values.flatten().sort().values[2].item()
    capped = s.clone()
    again = kernel_rows(capped, t, beta, unit, gain, clip=cap)
    assert torch.equal(values, again) and torch.allclose(capped, gain * plain * (values <= cap), atol=1e-7)
    assert (capped.abs().sum(-1) > 0).sum() in (2, 3)  # row 0 has gain 0


def test_rows_within_a_wider_buffer():
    room = drawn(6, 100)
    s, t = room[:3], room[3:]
    separate = s.clone()
    kernel_rows(separate, t.clone(), 0.5, 1.0, torch.ones(3, 1, device=ON))
    kernel_rows(s, t, 0.5, 1.0, torch.ones(3, 1, device=ON))
    assert torch.equal(s, separate)
    wide = drawn(3, 64)
    left, right = wide[:, :32], wide[:, 32:]
    apart = left.clone()
    kernel_rows(apart, right.clone(), 0.5, 1.0, torch.ones(3, 1, device=ON))
    kernel_rows(left, right, 0.5, 1.0, torch.ones(3, 1, device=ON))
    assert torch.equal(left, apart)


def test_no_rows_and_what_is_refused():
    none = drawn(0, 10)
    assert kernel_rows(none, none.clone(), 0.5, 1.0, drawn(0, 1)).shape == (0, 1)
    s = drawn(2, 10)
    for bad in (s.double(), s.half(), drawn(10, 2).t()):
        with pytest.raises(ValueError, match="fp32 logits whose rows lie alike, got .*: use rows.divergence"):
            kernel_rows(bad, bad.clone(memory_format=torch.preserve_format), 0.5, 1.0, drawn(2, 1))
    for other, gain in ((drawn(1, 10), drawn(2, 1)), (drawn(2, 10), drawn(1, 1)), (drawn(2, 10), drawn(2))):
        with pytest.raises(ValueError, match="want others alike and one gain a row"):
            kernel_rows(s, other, 0.5, 1.0, gain)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_what_is_no_number_is_not_hidden(beta, side):
    s, t = both = drawn(2, 10), drawn(2, 10, seed=1)
    both[side][0, 3] = math.nan
    value = kernel_rows(s, t, beta, 1.0, torch.ones(2, 1, device=ON))
    assert value.isnan().flatten().tolist() == [True, False] and s[0].isnan().any() and s[1].isfinite().all()


HEADS = {"plain": {}, "scale": {"scale": 0.25}, "soft cap": {"softcap": 2.0}, "bias": {"bias": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", HEADS)
def test_the_stream_by_kernel(head, dtype):
    h, t, w = (x.to(dtype) for x in (drawn(9, 16), drawn(9, 16, seed=1), drawn(300, 16, seed=2)))
    options = dict(HEADS[head])
    if options.pop("bias", False):
        options["bias"] = drawn(300, seed=3).to(dtype).index_fill_(0, torch.tensor([5], device=ON), -math.inf)
    weight = torch.linspace(0, 2, 9, device=ON)
    logits = [
        Head(w.double(), **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()})(
            x.double()
        ).clamp(min=-1e4)
        for x in (h, t)
    ]
    cap = exact(*logits, 0.4, 1.3)[0].median().item() + 1e-4  # some rows lie above it
    given = dict(beta=0.4, temperature=1.3, token_clip=cap, weight=weight, chunk=4)
    found = []
    for kernel, kind in ((True, dtype), (False, torch.float64)):
        a, b = h.to(kind).requires_grad_(), w.to(kind).requires_grad_()
        o = {k: v.to(kind) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        views = View(a, Head(b, **o)), View(t.to(kind), Head(b, **o))
        loss = fused_divergence_loss(*views, kernel=kernel, **given)
        found.append([loss.detach(), *torch.autograd.grad(loss, (a, b))])
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-5)
    assert (found[1][1].abs().sum(-1) > 0).sum() in (4, 5)  # the first row weighs nothing
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert max(relative(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True)) < limit


@pytest.mark.parametrize("options", [{}, {"sdpo_token_clip": 0.25}, {"sdpo_is_cap": 1.5}, {"sdpo_gate": 3.0}])
def test_the_channel_by_kernel(options, monkeypatch):
    monkeypatch.setattr("composer_nb.loss.channels.runs_kernel", lambda x: True)
    config = LossConfig(sdpo_jsd_beta=0.5, **options)
    h, t, w = drawn(9, 16), drawn(9, 16, seed=1), drawn(300, 16, seed=2, spread=0.3)
    h.requires_grad_()
    ids, share = torch.arange(9, device=ON), torch.linspace(0.1, 1, 9, device=ON)
    more = {"share": share, "count": 7.0}
    if "sdpo_is_cap" in options:
        more["old_logprobs"] = -drawn(9, seed=4).abs()
    ours = streamed_distillation(View(h, Head(w)), [View(t, Head(w))], ids, config, **more)
    theirs = distillation_channel(h @ w.T, t @ w.T, ids, config, **more)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert relative(*(torch.autograd.grad(x, h)[0] for x in (ours, theirs))) < 1e-5


def test_weights_that_are_given_read_no_logits(monkeypatch):
    """Without a cap or a gate nothing of the logits is copied for the weights."""
    seen = []
    monkeypatch.setattr("composer_nb.loss.channels.row_weights", lambda *a, **k: seen.append(1))
    h, t, w = drawn(4, 8), drawn(4, 8, seed=1), drawn(30, 8, seed=2)
    views = View(h, Head(w)), [View(t, Head(w))]
    streamed_distillation(*views, torch.arange(4, device=ON), LossConfig(), share=torch.ones(4, device=ON))
    assert not seen
    streamed_distillation(*views, torch.arange(4, device=ON), LossConfig(sdpo_gate=1.0))
    assert seen


def test_where_the_kernel_runs(monkeypatch):
    on_gpu = mock.Mock(is_cuda=True, dtype=torch.bfloat16)
    able = mock.Mock(return_value=(7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", able)
    monkeypatch.delenv("COMPOSER_NB_KERNEL", raising=False)
    assert runs_kernel(on_gpu) and not runs_kernel(torch.ones(2))
    assert not runs_kernel(mock.Mock(is_cuda=True, dtype=torch.float64))
    monkeypatch.setenv("COMPOSER_NB_KERNEL", "0")
    assert not runs_kernel(on_gpu)
    monkeypatch.setenv("COMPOSER_NB_KERNEL", "1")
    able.return_value = (6, 0)
    assert not runs_kernel(on_gpu)
    able.return_value = (9, 0)
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not runs_kernel(on_gpu)


def test_weights_that_are_a_view_of_the_logits_are_taken_before_the_kernel():
    s, t = drawn(4, 12), drawn(4, 12, seed=1)
    found = []
    for kernel in (False, True):
        step = divergence_step(0.5, weight=lambda s, t, rows: s[:, 0], kernel=kernel)
        given = [(x * step.scale).contiguous() for x in (s, t)]
        found.append(step.run(*given, slice(0, 4))[0].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_small_gradients_survive_sixteen_bits(kind):
    """As a GPU adds them up: all of a row lies next to or below what fp16 can hold."""
    hidden, weight = drawn(6, 16).to(kind), drawn(5000, 16, seed=1).to(kind)
    gradient = 1e-7 * drawn(6, 5000, seed=2) * torch.logspace(-2, 0, 6, device=ON).unsqueeze(1)
    factor = torch.linspace(1e-4, 1, 6, device=ON).unsqueeze(1)
    unit = torch.tensor(1 / 3, device=ON)
    limit = 6e-3 if kind == torch.bfloat16 else 1e-3
    for chunks in ([(0, 4), (4, 6)], [(0, 2)]):
        into = fused._Gradients(hidden, Head(weight), (True, True, False), unit)
        into.weight.fill_(math.nan)  # the first chunk overwrites
        for rows in (slice(*ends) for ends in chunks):
            fused._add_narrow(into, gradient[rows].clone(), weight, hidden, rows, factor[rows])
        rows = slice(0, chunks[-1][1])
        whole = (gradient[rows] * factor[rows]).double() / 3
        d_hidden, d_weight, _ = into.finished()
        assert relative(d_weight, whole.T @ hidden[rows].double()) < limit
        for row, wanted in zip(d_hidden, whole @ weight.double()):
            assert relative(row, wanted) < limit


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0, 2.0**24])
def test_a_loss_scale_reaches_gradients_before_they_are_fp16(scale):
    """Over many rows and a whole vocabulary hardly an entry of the head's gradient is one that fp16 holds."""
    given = drawn(64, 16), drawn(64, 16, seed=1), drawn(4000, 16, seed=2, spread=0.1)
    h, t, w = (x.half() for x in given)
    found = []
    for kind in (torch.float16, torch.float64):
        a, b = h.to(kind).requires_grad_(), w.to(kind).requires_grad_()
        loss = fused_divergence_loss(View(a, Head(b)), View(t.to(kind), Head(b)), denominator=1e4)
        found.append(torch.autograd.grad(loss * scale, (a, b)))
        assert found[-1][0].dtype == found[-1][1].dtype == kind
    errors = [relative(a, b) for a, b in zip(*found)]
    assert max(errors) > 1e-2 if scale == 1.0 else max(errors) < 1e-2


def test_gradients_of_nothing_are_nothing():
    hidden, weight = drawn(2, 8).half(), drawn(50, 8, seed=1).half()
    into = fused._Gradients(hidden, Head(weight), (True, True, False), torch.tensor(1.0, device=ON))
    fused._add_narrow(into, torch.zeros(2, 50, device=ON), weight, hidden, slice(0, 2), None)
    assert all((g == 0).all() for g in into.finished()[:2])


def test_a_gpu_streams_more_rows_at_a_time_through_its_kernel_alone():
    """What autograd works on takes many times a chunk beside it."""
    assert chunk_rows(8192, 151936, "cuda") > chunk_rows(8192, 151936) == chunk_rows(8192, 151936, "mps")
    assert divergence_step(0.5, kernel=True).kernel
    assert not divergence_step(0.5).kernel and not autograd_step(lambda s, t, rows: s.sum()).kernel
