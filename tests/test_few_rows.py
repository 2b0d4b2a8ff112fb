"""Products of few rows: the same numbers; nothing turned or left behind where the plain product belongs."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_nb.forward import few_rows
from composer_nb.forward.few_rows import FEW, turned, turning_few_rows
from composer_nb.forward.shared_body import sharing_prefixes

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture
def counted(monkeypatch):
    """How many products were turned."""
    seen = []
    monkeypatch.setattr(few_rows, "turned", lambda *given: seen.append(1) or turned(*given))
    return seen


@pytest.mark.parametrize("shape", [(2,), (FEW,), (2, 1), (1, FEW), (2, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_same_product_up_to_rounding(shape, bias, counted):
    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 96, bias=bias), torch.randn(*shape, 48)
    with torch.no_grad(), turning_few_rows(layer):
        found, plain = layer(rows), nn.Linear.forward(layer, rows)
    exact = rows.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert counted and found.is_contiguous() and found.shape == plain.shape
    assert (found - exact).abs().max() <= 2 * max((plain - exact).abs().max(), torch.tensor(1e-6))


@pytest.mark.parametrize("shape", [(1, 8), (FEW + 1, 8), (0, 8), (8,)])
def test_one_row_many_and_none_run_as_always(shape, counted):
    layer, rows = nn.Linear(8, 4), torch.randn(shape)
    with torch.no_grad(), turning_few_rows(layer):
        assert torch.equal(layer(rows), nn.Linear.forward(layer, rows)) and not counted


def test_gradients_other_numbers_and_autocast_run_as_always(counted):
    layer, rows = nn.Linear(8, 4), torch.randn(3, 8)
    with turning_few_rows(layer):
        layer(rows).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(rows).dtype is torch.bfloat16
    for numbers in (torch.bfloat16, torch.float64):
        other = copy.deepcopy(layer).to(numbers)
        with torch.no_grad(), turning_few_rows(other):
            assert other(rows.to(numbers)).dtype is numbers
    assert not counted and layer.weight.grad is not None


def test_what_is_somebody_elses_is_left_alone(counted):
    class Own(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) + 1

    own, patched = Own(8, 4), nn.Linear(8, 4)
    patched.forward = lambda rows: rows
    with torch.no_grad(), turning_few_rows(nn.Sequential(own, patched)):
        assert torch.equal(patched(torch.ones(2, 8)), torch.ones(2, 8))
        assert torch.equal(own(torch.ones(2, 8)), nn.Linear.forward(own, torch.ones(2, 8)) + 1)
    assert not counted and "forward" in patched.__dict__


def test_a_model_on_another_device_is_left_alone():
    model = nn.Sequential(nn.Linear(8, 4, device="meta"), nn.Linear(4, 4))
    with turning_few_rows(model):
        assert ["forward" in layer.__dict__ for layer in model] == [False, True]


def test_nothing_is_left_behind_by_an_error():
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ZeroDivisionError), turning_few_rows(model), turning_few_rows(model):
        1 / 0  # noqa: B018
    assert "forward" not in model[0].__dict__


def test_sampling_turns_and_says_the_same(counted):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **options)
    assert not counted
    with sharing_prefixes(model):
        assert torch.equal(model.generate(ids, **options), expected)
    layers = sum(type(m) is nn.Linear for m in model.modules())
    assert len(counted) >= 5 * layers  # every sampled token but the first, and the head with them
