"""The streamed divergence is the reference's value and gradient, for every head, dtype and member of the
menu, without N x V.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from composer_nb.distillation.divergence import generalized_jsd_loss
from composer_nb.distillation.fused import (
    Head,
    View,
    autograd_step,
    chunk_rows,
    divergence_step,
    fused_divergence_loss,
    streamed_loss,
)
from composer_nb.loss import PRESETS, LossConfig, distillation_channel, streamed_distillation

HEADS = {
    "plain": {},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "both": {"scale": 3.0, "softcap": 5.0},
}


def sides(rows=7, width=5, vocabulary=23, dtype=torch.float64, seed=0, spread=1.0):
    """Student hidden states, teacher hidden states, head weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (rows, width), (vocabulary, width))
    return [
        spread * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 10),
    vocabulary=st.integers(1, 40),
    beta=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]),
    temperature=st.floats(0.3, 3.0),
    clip=st.sampled_from([None, 0.05, 0.5]),
    head=st.sampled_from(list(HEADS)),
    bias=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_value_and_gradients_of_the_reference(
    rows, chunk, vocabulary, beta, temperature, clip, head, bias, weighted, seed
):
    h, t, w = sides(rows, 5, vocabulary, seed=seed)
    h.requires_grad_(), w.requires_grad_()
    b = torch.linspace(-1, 1, vocabulary, dtype=torch.float64).requires_grad_() if bias else None
    lens = Head(w, b, **HEADS[head])
    weight = torch.linspace(0, 2, rows, dtype=torch.float64) if weighted else None
    options = dict(beta=beta, temperature=temperature, token_clip=clip)
    ours = fused_divergence_loss(View(h, lens), View(t, lens), weight=weight, chunk=chunk, **options)
    theirs = generalized_jsd_loss(
        lens(h)[None], lens(t)[None].detach(), weight=None if weight is None else weight[None], **options
    )
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    inputs = [x for x in (h, w, b) if x is not None]
    for mine, reference in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert torch.allclose(mine, reference, atol=1e-12, rtol=1e-10)


# logits of a language model; two sides each sure of another token
@pytest.mark.parametrize("spread", [0.3, 1.5])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_single_precision(beta, spread):
    single = [x.float() for x in sides(64, 48, 5000, spread=spread)]
    exact = [x.double() for x in single]
    found = []
    for h, t, w in (exact, single):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        found.append(
            gradients(fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), beta=beta, chunk=20), h, w)
        )
    assert max(relative(b, a) for a, b in zip(*found, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_sixteen_bits_are_widened(beta, dtype, monkeypatch):
    from composer_nb.distillation import fused

    monkeypatch.setattr(fused, "_VOCAB_BLOCK", 700)  # several blocks, the last one short
    rounded = [x.to(dtype) for x in sides(64, 48, 5000)]
    found = []
    for h, t, w in ([x.double() for x in rounded], rounded):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        loss = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), beta=beta, chunk=20)
        found.append([loss.detach(), *gradients(loss, h, w)])
    assert found[1][0].dtype == torch.float32 and found[1][2].dtype == dtype
    assert found[1][0].item() == pytest.approx(found[0][0].item(), rel=1e-5)
    assert max(relative(b, a) for a, b in zip(found[0][1:], found[1][1:], strict=True)) < 1e-2


def test_equal_sides_have_neither_loss_nor_gradient():
    for beta, dtype in itertools.product((0.0, 0.5, 1.0), (torch.float64, torch.float32)):
        h, _, w = sides(dtype=dtype)
        h.requires_grad_(), w.requires_grad_()
        loss = fused_divergence_loss(View(h, Head(w)), View(h.detach(), Head(w.detach().clone())), beta=beta)
        tiny = 1e-14 if dtype == torch.float64 else 1e-6
        assert abs(loss.item()) < tiny and max(g.abs().max() for g in gradients(loss, h, w)) < tiny


def test_no_rows():
    h, t, w = sides(rows=0)
    h.requires_grad_(), w.requires_grad_()
    loss = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)))
    d_hidden, d_weight = gradients(loss, h, w)
    assert loss.item() == 0.0 and d_hidden.shape == h.shape and torch.equal(d_weight, torch.zeros_like(w))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_forbidden_and_distant_tokens_stay_finite(beta):
    h, _, w = (x.float() for x in sides(spread=30.0))
    h.requires_grad_(), w.requires_grad_()
    bias = torch.zeros(len(w)).index_fill_(0, torch.tensor([3, 4]), -math.inf)
    loss = fused_divergence_loss(View(h, Head(w, bias)), View(-h.detach(), Head(w.detach(), bias)), beta=beta)
    assert beta in (0.0, 1.0) or 0 <= loss.item() <= math.log(2) + 1e-6
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients(loss, h, w))
    assert (
        gradients(
            fused_divergence_loss(View(h, Head(w, bias)), View(-h.detach(), Head(w, bias)), beta=beta), w
        )[0][3:5]
        .abs()
        .max()
        == 0
    )


@settings(max_examples=30, deadline=None)
@given(beta=st.sampled_from([0.0, 0.02, 0.5, 0.9, 1.0]), seed=st.integers(0, 99))
def test_gradient_of_the_logits_sums_to_zero_over_the_vocabulary(beta, seed):
    h, t, w = sides(seed=seed)
    w.requires_grad_()
    (d_weight,) = gradients(fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), beta=beta), w)
    assert d_weight.sum(0).abs().max() < 1e-12 < d_weight.abs().max()


@settings(max_examples=30, deadline=None)
@given(beta=st.floats(0.001, 0.999), seed=st.integers(0, 99))
def test_mixture_bound_and_symmetry(beta, seed):
    h, t, w = sides(seed=seed, spread=2.0)
    value = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), beta=beta).item()
    swapped = fused_divergence_loss(View(t, Head(w)), View(h, Head(w)), beta=1 - beta).item()
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert 0 <= value <= entropy + 1e-12 and value == pytest.approx(swapped, abs=1e-12)


def test_backward_twice_and_scaled():
    h, t, w = sides()
    h.requires_grad_(), w.requires_grad_()
    loss = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)))
    once = torch.autograd.grad(loss, [h, w], retain_graph=True)
    kept = [g.clone() for g in once]
    thrice = torch.autograd.grad(3 * loss, [h, w])
    assert all(torch.equal(a, b) for a, b in zip(once, kept, strict=True))
    assert all(torch.allclose(3 * a, b, rtol=1e-14, atol=0) for a, b in zip(once, thrice, strict=True))


def test_second_derivative_is_refused():
    h, t, w = sides()
    loss = fused_divergence_loss(View(h.requires_grad_(), Head(w)), View(t, Head(w)))
    with pytest.raises(RuntimeError, match="no second derivative.*create_graph"):
        torch.autograd.grad(loss, h, create_graph=True)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_of_all_rows_by_vocabulary(monkeypatch):
    monkeypatch.setattr("composer_nb.distillation.fused._BLOCK", 2000)
    h, t, w = sides(rows=64, vocabulary=1000)
    h.requires_grad_(), w.requires_grad_()
    with Largest() as seen:
        fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), chunk=4).backward()
    assert seen.numel <= 2 * 4 * 1000  # student and teacher of one chunk
    with Largest() as seen:
        generalized_jsd_loss((h @ w.T)[None], (t @ w.T)[None]).backward()
    assert seen.numel >= 64 * 1000


def test_only_what_wants_a_gradient_is_multiplied():
    h, t, w = sides(rows=6, width=5, vocabulary=11)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
                products.append(func._overloadpacket)
            return func(*args, **(kwargs or {}))

    def count(**wants):
        products.clear()
        hidden, weight = h.clone().requires_grad_(wants["hidden"]), w.clone().requires_grad_(wants["weight"])
        with Products():
            loss = fused_divergence_loss(View(hidden, Head(weight)), View(t, Head(weight)), chunk=6)
            if loss.requires_grad:
                loss.backward()
        assert (hidden.grad is not None, weight.grad is not None) == (wants["hidden"], wants["weight"])
        return len(products)

    assert count(hidden=False, weight=False) == 1  # one head for both sides: one product
    assert count(hidden=True, weight=False) == 2
    assert count(hidden=True, weight=True) == 3


def test_under_autocast_the_head_keeps_its_precision():
    h, t, w = (x.float() for x in sides())
    expected = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused_divergence_loss(View(h, Head(w)), View(t, Head(w))), expected)
        low = fused_divergence_loss(View(h.bfloat16().requires_grad_(), Head(w)), View(t, Head(w)))
    low.backward()
    assert low.dtype == torch.float32


def test_splits_add_up():
    h, t, w = sides(rows=8)
    w.requires_grad_()
    whole = fused_divergence_loss(View(h, Head(w)), View(t, Head(w)))
    parts = [
        fused_divergence_loss(View(h[i], Head(w)), View(t[i], Head(w)), denominator=8)
        for i in (slice(0, 3), slice(3, 3), slice(3, 8))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-13)
    assert torch.allclose(gradients(sum(parts), w)[0], gradients(whole, w)[0], rtol=1e-12, atol=1e-15)


def test_different_widths_heads_and_shares():
    h, t, w = sides()
    other, wide = torch.randn(23, 9, dtype=torch.float64), torch.randn(7, 9, dtype=torch.float64)
    h.requires_grad_()
    mixed = fused_divergence_loss(
        View(h, Head(w)),
        [View(t, Head(w, scale=0.5), 0.7), View(wide, Head(other, softcap=2.0), 0.3)],
        chunk=3,
    )
    teacher = 0.7 * Head(w, scale=0.5)(t) + 0.3 * Head(other, softcap=2.0)(wide)
    reference = generalized_jsd_loss((h @ w.T)[None], teacher[None])
    assert mixed.item() == pytest.approx(reference.item(), abs=1e-13)
    assert torch.allclose(gradients(mixed, h)[0], gradients(reference, h)[0], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(beta=1.5), "beta must lie in .0, 1., got 1.5"),
        (dict(temperature=0.0), "temperature must be positive, got 0"),
        (dict(weight=torch.ones(3)), r"weight \(3,\) must give one number for each of the 7 rows"),
    ],
)
def test_bad_options_are_named(change, message):
    h, t, w = sides()
    with pytest.raises(ValueError, match=message):
        fused_divergence_loss(View(h, Head(w)), View(t, Head(w)), **change)


def test_unequal_rows_or_vocabularies_are_named():
    h, t, w = sides()
    with pytest.raises(ValueError, match="7 rows of 23 against 3 of 23"):
        fused_divergence_loss(View(h, Head(w)), View(t[:3], Head(w)))
    with pytest.raises(ValueError, match="7 rows of 23 against 7 of 20"):
        fused_divergence_loss(View(h, Head(w)), View(t, Head(w[:20])))


@given(rows=st.integers(0, 10**6), vocabulary=st.integers(1, 10**6))
def test_chunks_cover_and_fit(rows, vocabulary):
    chunk = chunk_rows(rows, vocabulary)
    assert 1 <= chunk <= max(1, rows) and (chunk == 1 or chunk * 8 * vocabulary <= 320 * 2**20)


MENU = {name: options for name, options in PRESETS.items() if options.get("alpha_sdpo")} | {
    "kl teacher": dict(sdpo_jsd_beta=0.0),
    "token clip": dict(sdpo_token_clip=0.45),
    "entry clip": dict(sdpo_entry_clip=0.02),
    "teacher top k": dict(sdpo_top_k=5, sdpo_top_k_source="teacher", sdpo_tail=False),
    "sampled": dict(sdpo_sampled=True, sdpo_jsd_beta=1.0),
    "taid": dict(sdpo_wrapper="taid", taid_t=0.4),
    "blend": dict(sdpo_wrapper="entropy_opd"),
    "gate": dict(sdpo_gate=5.0),
    "importance": dict(sdpo_is_cap=1.5, sdpo_temperature=1.4),
    "importance and gate, top k": dict(sdpo_is_cap=1.5, sdpo_gate=2.0, sdpo_top_k=4),
}


@pytest.mark.parametrize("name", MENU)
def test_the_whole_menu_streams(name):
    options = {k: min(v, 5) if k == "sdpo_top_k" else v for k, v in MENU[name].items()}
    config = LossConfig(**{"alpha_sdpo": 1.0} | options)
    h, t, w = sides()
    ids, old = torch.arange(7) % 23, torch.linspace(-4, -1, 7, dtype=torch.float64)
    plain = config.sdpo_wrapper == "none"
    weighting = dict(
        old_logprobs=old,
        sampling_temperature=0.8,
        share=torch.linspace(0.2, 1, 7, dtype=torch.float64) if plain else None,
    )
    found = []
    for streamed in (True, False):
        hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
        head = Head(weight, scale=0.7)
        if streamed:
            loss = streamed_distillation(View(hidden, head), [View(t, head)], ids, config, 5, **weighting)
        else:
            loss = distillation_channel(head(hidden), head(t), ids, config, 5, **weighting)
        found.append([loss.detach(), *gradients(loss, hidden, weight)])
    for mine, reference in zip(*found, strict=True):
        assert torch.allclose(mine, reference, rtol=1e-10, atol=1e-13) and reference.abs().max() > 0


def test_a_step_without_a_gradient_gives_zero():
    h, t, w = sides()
    h.requires_grad_()
    loss = streamed_loss(View(h, Head(w)), View(t, Head(w)), autograd_step(lambda s, t, rows: t.sum() * 0.0))
    assert torch.equal(gradients(loss, h)[0], torch.zeros_like(h))


def test_row_weights_see_logits_in_their_own_unit():
    h, t, w = sides()
    seen = []
    step = divergence_step(
        0.5, temperature=2.0, weight=lambda s, t, rows: seen.append((s.clone(), t.clone()))
    )
    streamed_loss(View(h, Head(w)), View(t, Head(w)), step)
    assert torch.allclose(seen[0][0], h @ w.T) and torch.allclose(seen[0][1], t @ w.T)
