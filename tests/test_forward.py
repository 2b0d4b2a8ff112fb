"""One pass, shared prefixes: the same logits and gradients as the model's own forward, fewer tokens, honest
fallbacks.
"""

import contextlib
import gc
import inspect
import itertools
import os
import random
from types import SimpleNamespace

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from composer_nb.forward import (
    continued_forward_pass,
    eval_mode,
    forward_pass,
    grouped_heads,
    head_shortcut,
    prefix_shortcut,
    prefixes,
    project,
    shared_forward_pass,
    shared_prefixes,
)
from composer_nb.forward.prefixes import continuations
from composer_nb.forward.sharing import paying_plan, two_levels
from composer_nb.forward.states import cache_keyword, run_body

SPECIAL = dict(bos_token_id=1, eos_token_id=2)
SMALL = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, **SPECIAL)  # fmt: skip
GPT = dict(vocab_size=64, n_embd=16, n_layer=2, n_head=2, **SPECIAL)
NEOX = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **SPECIAL
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
SHARING = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "gemma2, window 4, soft cap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, sliding_window=4, final_logit_softcapping=2.0, pad_token_id=0)
    ),
    "mistral, window 4": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL, pad_token_id=0)),
    "cohere, logit scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25, pad_token_id=0)),
    "granite, logits scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **MOE)),
    "bloom, alibi": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, **SPECIAL)
    ),
    "gpt2, absolute, float64": lambda: GPT2LMHeadModel(GPT2Config(**GPT)).double(),
    "gpt neox, float64": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)).double(),
}
PLAIN = {
    "mamba, running state": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    ),
    "lfm2, convolutions": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    ),
}


def build(make, seed: int = 0) -> nn.Module:
    """A random model whose attention matters: at the default spread a wrong position would hardly show."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3)
    return model


def grown(seed: int = 0, count: tuple[int, ...] = (3, 2, 1)) -> list[list[int]]:
    """Rows of ragged length: three that share 11 tokens, two that share 8, one on its own."""
    draw = random.Random(seed)
    rows = []
    for n, k in zip(count, (11, 8, 0), strict=True):
        prefix = [draw.randint(3, 60) for _ in range(k)]
        rows += [prefix + [draw.randint(3, 60) for _ in range(draw.randint(2, 9))] for _ in range(n)]
    draw.shuffle(rows)
    return rows


def padded(rows: list[list[int]], side: str = "right", extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask; padding is filled with a real token's id, so that only the mask can tell."""
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        ids[i, start : start + len(row)] = torch.tensor(row, dtype=torch.long)
        mask[i, start : start + len(row)] = 1
    return ids, mask


def predicted(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every token that has a real one before it."""
    return ((mask.cumsum(1) > 1) & mask.bool()).nonzero(as_tuple=True)


def rel(ours: torch.Tensor, own: torch.Tensor) -> float:
    return ((ours - own).norm() / own.norm()).item()


def gradient(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    model.zero_grad()
    (logits * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", SHARING)
def test_shared_prefixes_give_the_models_own_logits_and_gradients(family, side):
    model = build(SHARING[family])
    limit = 1e-9 if next(model.parameters()).dtype == torch.float64 else 2e-5
    rows = grown()
    ids, mask = padded(rows, side)
    batch, token = predicted(mask)
    shared = shared_forward_pass(model, ids, mask)
    assert prefix_shortcut(model) and shared.positions < shared.plain_positions
    logits = shared.logits(batch, token)
    own = torch.cat([model(input_ids=torch.tensor([row])).logits[0, :-1] for row in rows])
    assert rel(logits, own) < limit
    assert rel(gradient(model, logits), gradient(model, own)) < limit * 10


def kept(model: nn.Module, within) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits and gradient of a padded batch, and the bytes that autograd kept for it."""
    ids, mask = padded([[5, 6, 7], list(range(3, 40)), list(range(8, 30))], "left")
    sizes: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with within, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[mask.bool()], gradient(model, logits[mask.bool()]), sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grouped_heads_are_the_copied_ones(dtype):
    sizes = dict(vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2)
    torch.manual_seed(0)
    heads = dict(num_attention_heads=6, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)
    plain = kept(model, contextlib.nullcontext())
    grouped = kept(model, grouped_heads(torch.device("cpu")))
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    assert rel(grouped[0], plain[0]) < limit and rel(grouped[1], plain[1]) < limit
    if dtype == torch.float32:
        assert grouped[2] < 0.95 * plain[2]  # of each layer's keys and values two heads, not six


@pytest.fixture
def no_accelerator():
    """Accelerate keeps one state in a process; other tests may have left one, and must not meet
    this one's.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_prepared_for_mixed_precision_shares_as_before(no_accelerator):
    model = tiny.model().train()
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    wrapped = prepared.forward
    assert head_shortcut(prepared) and continuations(prepared) == 2
    assert (
        prepared.forward is wrapped
        and prepared(input_ids=torch.tensor([[5, 6, 7]])).logits.dtype == torch.float32
    )


def test_grouped_heads_leave_the_environment_as_it_was(monkeypatch):
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    monkeypatch.delenv(name, raising=False)
    with grouped_heads(torch.device("cuda")):
        assert name not in os.environ
    with pytest.raises(KeyError), grouped_heads(torch.device("cpu")):
        assert os.environ[name] == "1"
        with grouped_heads(torch.device("cpu")):
            assert os.environ[name] == "1"
        assert os.environ[name] == "1"
        raise KeyError
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with grouped_heads(torch.device("cpu")):
        assert os.environ[name] == "0"


def below_one_message(seed: int = 0) -> list[list[int]]:
    """Two system messages; under the first three questions (of three, two and one answers), under
    the second two.
    """
    draw = random.Random(seed)
    some = lambda n: [draw.randint(3, 60) for _ in range(n)]  # noqa: E731
    rows = []
    for answers in ((3, 2, 1), (2, 2)):
        system = some(14)
        for n in answers:
            question = some(draw.randint(8, 12))
            rows += [system + question + some(draw.randint(1, 4)) for _ in range(n)]
    rows.append(some(5))
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", SHARING)
def test_two_levels_give_the_models_own_logits_and_gradients(family, side):
    model, rows = build(SHARING[family]), below_one_message()
    limit = 1e-9 if next(model.parameters()).dtype == torch.float64 else 2e-5
    levels = 1 if "window" in family else 2
    assert continuations(model) == levels
    ids, mask = padded(rows, side)
    batch, token = predicted(mask)
    ran = []
    with model.base_model.register_forward_pre_hook(
        lambda module, args, options: ran.append(options["input_ids"].numel()), with_kwargs=True
    ):
        shared = shared_forward_pass(model, ids, mask)
    assert len(ran) == levels + 2 and sum(ran) == shared.positions == paying_plan(rows, levels).positions
    logits = shared.logits(batch, token)
    own = torch.cat([model(input_ids=torch.tensor([row])).logits[0, :-1] for row in rows])
    assert rel(logits, own) < limit
    assert rel(gradient(model, logits), gradient(model, own)) < limit * 10


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=7))
def test_what_two_levels_share_is_common(rows):
    found, flat = two_levels(rows), shared_prefixes(rows)
    assert sorted(itertools.chain(*found.groups)) == list(range(len(rows)))
    assert found.positions <= flat.positions
    heads = []
    for group, k in zip(found.groups, found.shared, strict=True):
        assert all(rows[row][:k] == rows[group[0]][:k] for row in group)
        assert all(len(rows[row]) > k for row in group if k)
        heads += [rows[group[0]][:k]] * bool(k)
    if found.above is not None:
        above = found.above
        assert above.lengths == tuple(map(len, heads))
        assert sorted(itertools.chain(*above.groups)) == list(range(len(heads)))
        for group, k in zip(above.groups, above.shared, strict=True):
            assert k > 0 and all(heads[head][:k] == heads[group[0]][:k] for head in group)


@pytest.mark.parametrize("family", PLAIN)
def test_a_model_whose_cache_cannot_be_shared_runs_plainly(family):
    model = build(PLAIN[family])
    rows = grown()
    ids, mask = padded(rows)
    batch, token = predicted(mask)
    shared = shared_forward_pass(model, ids, mask)
    assert not prefix_shortcut(model) and shared.positions == ids.numel()
    own = torch.cat([model(input_ids=torch.tensor([row])).logits[0, :-1] for row in rows])
    assert rel(shared.logits(batch, token), own) < 2e-5


ROWS = st.lists(st.lists(st.sampled_from([3, 4]), min_size=0, max_size=6), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_whatever_the_rows_share_every_token_is_answered(rows, side, extra):
    rows = [[5] * 4 + row if i % 3 else row for i, row in enumerate(rows)]
    ids, mask = padded(rows, side, extra + (max(map(len, rows)) == 0))
    batch, token = predicted(mask)
    with torch.no_grad():
        shared = shared_forward_pass(LLAMA, ids, mask)
        assert len(batch) == sum(max(0, len(row) - 1) for row in rows)
        if len(batch):
            own = torch.cat(
                [LLAMA(input_ids=torch.tensor([row])).logits[0, :-1] for row in rows if len(row) > 1]
            )
            assert rel(shared.logits(batch, token), own) < 2e-5
            assert torch.equal(project(LLAMA, shared.states_at(batch, token)), shared.logits(batch, token))


LLAMA = build(SHARING["llama"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_grouping_is_a_best_cut_of_the_sorted_rows(rows):
    found = shared_prefixes(rows)
    assert sorted(itertools.chain(*found.groups)) == list(range(len(rows)))
    for group, k in zip(found.groups, found.shared, strict=True):
        assert all(rows[row][:k] == rows[group[0]][:k] for row in group)
        assert (k > 0) == (len(group) > 1) and all(len(rows[row]) > k for row in group if k)
    assert found.computed_tokens == sum(k for k in found.shared) + sum(
        len(rows[row]) - k for group, k in zip(found.groups, found.shared, strict=True) for row in group
    )
    assert found.tokens_saved == max(saving(cut) for cut in cuts(sorted(rows)))


def cuts(rows):
    """Every way to cut a list into runs."""
    for pattern in itertools.product([0, 1], repeat=max(0, len(rows) - 1)):
        runs, start = [], 0
        for i, cut in enumerate([*pattern, 1], start=1):
            if cut:
                runs.append(rows[start:i])
                start = i
        yield runs


def saving(runs) -> int:
    total = 0
    for run in runs:
        longest = min((len(row) - 1 for row in run), default=0)
        k = max((n for n in range(longest + 1) if len({tuple(row[:n]) for row in run}) == 1), default=0)
        total += (len(run) - 1) * k
    return total


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=6), st.randoms())
def test_the_order_of_rows_does_not_matter(rows, draw):
    order = list(range(len(rows)))
    draw.shuffle(order)

    def seen(rows):
        found = shared_prefixes(rows)
        groups = [sorted(tuple(rows[row]) for row in group) for group in found.groups]
        return sorted(zip(groups, found.shared, strict=True)), found.tokens_saved, found.positions

    assert seen([rows[i] for i in order]) == seen(rows)


def test_positions_are_what_the_body_runs_over(monkeypatch):
    ids, mask = padded(grown())
    counted = []
    handle = LLAMA.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: counted.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        shared = shared_forward_pass(LLAMA, ids, mask)
    finally:
        handle.remove()
    assert sum(counted) == shared.positions and len(counted) == 3  # prefixes, suffixes, the row on its own


def test_a_saving_that_does_not_pay_takes_the_plain_pass():
    rows = [[5, *range(10, 40)], [5, *range(20, 50)]]
    assert shared_forward_pass(LLAMA, *padded(rows)).positions == 62
    assert shared_prefixes(rows).tokens_saved == 1


def test_only_what_is_needed_is_kept_and_the_rest_is_refused():
    rows = [[5] * 8 + [9, 10, 11], [5] * 8 + [12, 13], [6] * 9 + [3]]
    ids, mask = padded(rows, "left")
    needed = torch.tensor([8, 9, 10])  # columns of the padded rows
    whole, part = shared_forward_pass(LLAMA, ids, mask), shared_forward_pass(LLAMA, ids, mask, needed)
    batch, token = torch.tensor([0, 0, 1, 2]), torch.tensor([8, 10, 9, 10])
    assert torch.equal(part.logits(batch, token), whole.logits(batch, token))
    assert (
        len(part.states) == 3 + 2 + 1 - 1 < len(whole.states)
    )  # the prefix's last state predicts for two rows
    for row, column in ((0, 7), (1, 8), (2, 9)):
        with pytest.raises(ValueError, match=f"row {row}, token {column}: .*needed_from"):
            part.logits(torch.tensor([0, row]), torch.tensor([9, column]))
        whole.states_at(torch.tensor([row]), torch.tensor([column]))


@pytest.mark.parametrize("model", [LLAMA, build(PLAIN["lfm2, convolutions"])], ids=["shared", "plain"])
def test_first_tokens_and_padding_have_no_predictor(model):
    rows = [[5] * 8 + [9, 10, 11], [5] * 8 + [12, 13]]
    ids, mask = padded(rows)
    shared = shared_forward_pass(model, ids, mask, torch.tensor([2, 9]))
    for row, column in ((0, 0), (1, 10), (0, -1), (1, 8)):
        with pytest.raises(ValueError, match=f"row {row}, token {column}"):
            shared.logits(torch.tensor([row]), torch.tensor([column]))
    assert shared.logits(torch.tensor([1]), torch.tensor([9])).shape == (1, 64)
    assert shared.logits(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)).shape == (
        0,
        64,
    )
    with pytest.raises(ValueError, match="needed_from .3,. must hold one column for each of the 2 rows"):
        shared_forward_pass(model, ids, mask, torch.tensor([1, 2, 3]))


def test_real_tokens_may_stand_anywhere():
    rows = [[5] * 8 + [9, 10, 11], [5] * 8 + [12, 13]]
    ids, mask = torch.full((2, 16), 7), torch.zeros(2, 16, dtype=torch.long)
    columns = [[1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 15], [0, 2, 4, 5, 6, 7, 8, 9, 10, 14]]
    for i, (row, places) in enumerate(zip(rows, columns, strict=True)):
        ids[i, places], mask[i, places] = torch.tensor(row), 1
    shared = shared_forward_pass(LLAMA, ids, mask)
    assert shared.positions == 8 + 6
    own = LLAMA(input_ids=torch.tensor([rows[1]])).logits[0, [7, 8]]
    assert rel(shared.logits(torch.tensor([1, 1]), torch.tensor([10, 14])), own) < 2e-5


def test_rows_without_a_token_and_batches_without_a_row_that_has_one():
    rows = [[], [5] * 6 + [3], [5] * 6 + [4, 9], [8]]
    ids, mask = padded(rows)
    shared = shared_forward_pass(LLAMA, ids, mask)
    own = LLAMA(input_ids=torch.tensor([rows[2]])).logits[0, -2:-1]
    assert rel(shared.logits(torch.tensor([2]), torch.tensor([7])), own) < 2e-5
    nothing = shared_forward_pass(LLAMA, ids, torch.zeros_like(mask))
    assert (nothing.slot == -1).all()


def test_a_whole_prompt_shared_by_a_pair_has_the_plain_gradient_in_float64():
    model = build(SHARING["gpt2, absolute, float64"])
    ids, mask = padded([[*range(5, 25), 30, 31, 32], [*range(5, 25), 40]])
    batch, token = torch.tensor([0, 0, 0, 1]), torch.tensor([20, 21, 22, 20])
    shared = shared_forward_pass(model, ids, mask, torch.tensor([20, 20]))
    plain = forward_pass(model, ids, mask)
    assert shared.positions == 20 + 2 * 3
    ours, theirs = (gradient(model, encoded.logits(batch, token)) for encoded in (shared, plain))
    assert rel(ours, theirs) < 1e-12
    shared = shared_forward_pass(model, ids, mask, torch.tensor([20, 20]))
    assert rel(gradient(model, project(model, shared.states_at(batch, token))), theirs) < 1e-12


def test_no_gradient_is_asked_for_under_no_grad():
    ids, mask = padded(grown())
    with torch.no_grad():
        assert not shared_forward_pass(LLAMA, ids, mask).states.requires_grad
    assert shared_forward_pass(LLAMA, ids, mask).states.requires_grad


# --- the check ----------------------------------------------------------------------------------------------


class Forgetful(LlamaForCausalLM):
    """Takes a cache and does not read it: a check of signatures alone would let it pass."""

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.forward

        def forward(
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            use_cache=None,
            **kwargs,
        ):
            mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
            return inner(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=use_cache,
                **kwargs,
            )

        self.model.forward = forward


class Raising(LlamaForCausalLM):
    """Cannot be called with a cache."""

    error: Exception = TypeError("no cache here")

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.forward

        def forward(input_ids=None, past_key_values=None, use_cache=None, **kwargs):
            if use_cache:
                raise self.error
            return inner(input_ids=input_ids, use_cache=use_cache, **kwargs)

        self.model.forward = forward


class Cacheless(LlamaForCausalLM):
    """A body whose forward has no argument for a cache."""

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.forward

        def forward(input_ids=None, attention_mask=None, position_ids=None, **kwargs):
            return inner(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
            )

        self.model.forward = forward


class OtherName(LlamaForCausalLM):
    """Calls its cache by the other of two names: that of transformers 5.24 on, or that of before."""

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.forward
        known = cache_keyword(inner)
        other = {"cache": "past_key_values", "past_key_values": "cache"}[known]

        def forward(input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
            held = {known: kwargs.pop(other)} if other in kwargs else {}
            output = inner(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                use_cache=use_cache, **held, **kwargs,
            )  # fmt: skip
            if other == "cache":
                output.cache, output.past_key_values = output.past_key_values, None
            return output

        names = inspect.signature(forward).parameters.values()
        more = inspect.Parameter(other, inspect.Parameter.KEYWORD_ONLY, default=None)
        forward.__signature__ = inspect.Signature([*list(names)[:-1], more, list(names)[-1]])
        self.model.forward = forward


def test_a_cache_goes_by_either_name():
    model = build(lambda: OtherName(LlamaConfig(**SMALL)))
    usual = LlamaForCausalLM(LlamaConfig(**SMALL))
    assert {cache_keyword(lm.model.forward) for lm in (model, usual)} == {"cache", "past_key_values"}
    assert continuations(model) == 2
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    shared = shared_forward_pass(model, ids, mask)
    plain = forward_pass(model, ids, mask)
    assert rel(shared.logits(batch, token), plain.logits(batch, token)) < 1e-5


def test_a_body_that_takes_no_cache_is_not_run_without_it():
    body = build(lambda: Cacheless(LlamaConfig(**SMALL))).model
    ids = torch.tensor([[1, 2]])
    with pytest.raises(TypeError, match="LlamaModel.forward takes no cache"):
        run_body(body, ids, torch.ones(1, 4, dtype=torch.long), use_cache=True, cache=DynamicCache())


@pytest.mark.parametrize("kind", [Forgetful, Raising, Cacheless])
def test_odd_models_do_not_raise_and_run_plainly(kind):
    model = build(lambda: kind(LlamaConfig(**SMALL)))
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    assert head_shortcut(model) and not prefix_shortcut(model)
    assert (
        rel(
            shared_forward_pass(model, ids, mask).logits(batch, token),
            forward_pass(model, ids, mask).logits(batch, token),
        )
        == 0
    )


@pytest.mark.parametrize("error",
                         [ValueError("x"), KeyError("x"), IndexError("x"), AttributeError("x"),
                          NotImplementedError("x"), RuntimeError("x")])  # fmt: skip
def test_the_check_takes_what_odd_models_raise_as_no(error):
    model = build(lambda: Raising(LlamaConfig(**SMALL)))
    model.error = error
    assert not prefix_shortcut(model)


def test_caches_of_another_kind_are_not_repeated():
    class Running(DynamicLayer):
        pass

    cache = DynamicCache()
    with pytest.raises(ValueError, match="no layers"):
        prefixes._select_rows(cache, torch.tensor([0]))
    cache.layers = [DynamicLayer(), Running()]
    with pytest.raises(ValueError, match="Running"):
        prefixes._select_rows(cache, torch.tensor([0]))


def test_dropout_does_not_fail_the_check():
    model = build(lambda: GPT2LMHeadModel(GPT2Config(**GPT, resid_pdrop=0.5)))
    assert prefix_shortcut(model.train()) and model.training


def test_out_of_memory_is_raised_and_not_remembered():
    model = build(lambda: Raising(LlamaConfig(**SMALL)))
    model.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        prefix_shortcut(model)
    assert model not in prefixes._PREFIX


def test_a_module_that_is_no_language_model():
    assert not prefix_shortcut(nn.Linear(2, 2))


def test_a_bent_head_gives_logits_but_no_states():
    model = build(SHARING["llama"])
    plain = type(model).forward

    def bent(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.roll(1, -1) * 3
        return output

    model.forward = bent.__get__(model)
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    shared, whole = shared_forward_pass(model, ids, mask), forward_pass(model, ids, mask)
    assert not prefix_shortcut(model) and not shared.shortcut
    own = model(input_ids=ids, attention_mask=mask).logits[batch, token - 1]
    assert rel(shared.logits(batch, token), own) < 2e-5
    for encoded in (shared, whole):
        with pytest.raises(ValueError, match="logits\\(\\) instead"):
            encoded.states_at(batch, token)


def test_states_at_of_one_plain_pass():
    ids, mask = padded(grown(), "left")
    batch, token = predicted(mask)
    encoded = forward_pass(LLAMA, ids, mask)
    assert torch.equal(project(LLAMA, encoded.states_at(batch, token)), encoded.logits(batch, token))


def test_gradient_checkpointing_is_looked_at_in_every_call():
    model = build(SHARING["llama"])
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    model.gradient_checkpointing_enable()
    seen = [prefix_shortcut(model.train()), prefix_shortcut(model.eval())]
    theirs = gradient(model, forward_pass(model, ids, mask).logits(batch, token))
    for training in (True, False):
        shared = shared_forward_pass(model.train(training), ids, mask)
        assert (shared.positions == ids.numel()) == training
        assert rel(gradient(model, shared.logits(batch, token)), theirs) < 2e-5
    model.gradient_checkpointing_disable()
    assert [*seen, prefix_shortcut(model.train())] == [False, True, True]


def test_the_check_leaves_modes_random_numbers_and_gradients_alone():
    model = build(SHARING["llama"]).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    head_shortcut(model.eval())  # its own check puts the whole model into one mode: not what is tested here
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training
    state = torch.random.get_rng_state()
    assert prefix_shortcut(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_eval_mode_is_left_again_when_something_raises():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()
    with pytest.raises(KeyError), eval_mode(model):
        assert not model[0].training
        raise KeyError
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_the_memory_of_the_check_does_not_keep_models_alive():
    model = build(SHARING["llama"])
    assert prefix_shortcut(model) and model in prefixes._PREFIX
    before = len(prefixes._PREFIX)
    del model
    gc.collect()
    assert len(prefixes._PREFIX) < before


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10.0}
LONG = {"rope_type": "longrope", "rope_theta": 10.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4,
        "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize("rope, longest", [(DYNAMIC, 16), (LONG, 64)], ids=["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_not_mixed(rope, longest, monkeypatch):
    model = build(
        lambda: LlamaForCausalLM(
            LlamaConfig(**SMALL, max_position_embeddings=longest, rope_parameters=dict(rope))
        )
    )
    short, long = ([[*range(5, 5 + n), *tail] for tail in ([40, 41], [50, 51, 52])] for n in (9, 15))
    for rows, shares in ((short, True), (long, False)):
        ids, mask = padded(rows)
        batch, token = predicted(mask)
        shared = shared_forward_pass(model, ids, mask)
        assert (shared.positions < ids.numel()) == shares
        own = model(input_ids=ids, attention_mask=mask).logits[batch, token - 1]
        assert rel(shared.logits(batch, token), own) < 2e-5
    mask_of_tail = torch.ones_like(ids[:, 15:])
    following = continued_forward_pass(
        model, ids[:1, :15], mask[:1, :15], ids[:, 15:], mask_of_tail, torch.tensor([0, 0])
    )
    assert following.positions == following.plain_positions
    monkeypatch.setattr(prefixes, "_rope_limit", lambda config: float("inf"))
    assert (
        rel(shared_forward_pass(model, ids, mask).logits(batch, token), own) > 1e-3
    )  # what the guard prevents


@pytest.mark.parametrize(
    "rope, limit",
    [
        (None, float("inf")),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, float("inf")),
        ({"rope_type": "dynamic"}, 32),
        ({"rope_type": "dynamic", "original_max_position_embeddings": 99}, 32),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, 8),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 8},
          "sliding_attention": {"rope_type": "default"}}, 8),
        ({"full_attention": {"rope_type": "llama3"}, "sliding_attention": {"rope_type": "default"}},
         float("inf")),
    ],
)  # fmt: skip
def test_the_longest_row_whose_frequencies_are_fixed(rope, limit):
    assert prefixes._rope_limit(SimpleNamespace(rope_parameters=rope, max_position_embeddings=32)) == limit


def test_agreement_is_as_wide_as_the_dtype():
    own = torch.ones(100)
    assert prefixes._agree(own + 1e-5, own) and not prefixes._agree(own + 1e-3, own)
    half = own.bfloat16()
    assert prefixes._agree(half + 0.01, half) and not prefixes._agree(half + 0.1, half)
    assert not prefixes._agree(own * float("nan"), own) and not prefixes._agree(own, own * float("nan"))


# --- wrappers and precision ---------------------------------------------------------------------------------


def test_adapters_and_wrappers_are_seen_through():
    import peft

    base = build(SHARING["llama"])
    student = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    wrapped = nn.Module()
    wrapped.module = student
    own = student(input_ids=ids, attention_mask=mask).logits[batch, token - 1]
    shared = shared_forward_pass(wrapped, ids, mask)
    assert shared.positions < ids.numel() and rel(shared.logits(batch, token), own) < 2e-5
    with student.disable_adapter():
        off = shared_forward_pass(student, ids, mask).logits(batch, token)
    assert rel(off, LLAMA(input_ids=ids, attention_mask=mask).logits[batch, token - 1]) < 2e-5 < rel(off, own)


def test_bf16_weights_and_autocast_share_too():
    ids, mask = padded(grown())
    batch, token = predicted(mask)
    exact = forward_pass(LLAMA, ids, mask).logits(batch, token)
    half = build(SHARING["llama"]).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fresh = build(SHARING["llama"])  # so that the check itself runs under autocast
        cast = shared_forward_pass(fresh, ids, mask)
    shared = shared_forward_pass(half, ids, mask)
    for encoded in (shared, cast):
        assert encoded.positions < ids.numel()
        assert rel(encoded.logits(batch, token).float(), exact) < 0.05


# --- continuations ------------------------------------------------------------------------------------------


def continued(model, prefixes, suffixes, owner, side="right", other="right"):
    ids, mask = padded(prefixes, side, extra=2)
    more, more_mask = padded(suffixes, other, extra=1)
    encoded = continued_forward_pass(model, ids, mask, more, more_mask, torch.tensor(owner))
    batch = torch.tensor([i for i, row in enumerate(suffixes) for _ in row], dtype=torch.long)
    token = torch.tensor([t for row in suffixes for t in range(len(row))], dtype=torch.long)
    own = [model(input_ids=torch.tensor([prefixes[p] + row])).logits[0, len(prefixes[p]) - 1 : -1]
           for p, row in zip(owner, suffixes, strict=True)]  # fmt: skip
    return encoded, encoded.logits(batch, token), torch.cat(own)


PREFIXES, SUFFIXES, OWNER = (
    [[*range(5, 14)], [20], [30, 31, 32, 33]],
    [[40, 41], [50], [40, 41, 42], [], [7]],
    [0, 1, 0, 2, 2],
)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("other", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral, window 4", "gpt2, absolute, float64"])
def test_continuations_from_either_side(family, side, other):
    model = build(SHARING[family])
    limit = 1e-9 if next(model.parameters()).dtype == torch.float64 else 2e-5
    encoded, logits, own = continued(model, PREFIXES, SUFFIXES, OWNER, side, other)
    assert encoded.positions < encoded.plain_positions and rel(logits, own) < limit
    assert rel(gradient(model, logits), gradient(model, own)) < limit * 10


def test_continuations_of_a_model_that_cannot():
    model = build(PLAIN["lfm2, convolutions"])
    encoded, logits, own = continued(model, PREFIXES, SUFFIXES, OWNER, "left")
    assert encoded.positions == encoded.plain_positions and rel(logits, own) < 2e-5


def test_continuations_name_what_does_not_fit():
    ids, mask = padded(PREFIXES)
    more, more_mask = padded(SUFFIXES)
    owner = torch.tensor(OWNER)
    encoded = continued_forward_pass(LLAMA, ids, mask, more, more_mask, owner)
    for row, column in ((1, 1), (3, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"row {row}, token {column}"):
            encoded.states_at(torch.tensor([row]), torch.tensor([column]))
    empty = mask.clone()
    empty[1] = 0
    for arguments, says in (
        ((ids, empty, more, more_mask, owner), "prefix 1 has no real token"),
        ((ids, mask, more, more_mask, owner + 1), r"must lie in \[0, 2\], got \[1, 2, 1, 3, 3\]"),
        ((ids, mask, more, more_mask, owner - 1), "must lie in"),
        ((ids, mask, more, more_mask, owner[:2]), "one prefix for each of the 5 suffixes"),
        ((ids, mask[:, 1:], more, more_mask, owner), "must have one shape"),
    ):
        with pytest.raises(ValueError, match=says):
            continued_forward_pass(LLAMA, *arguments)


def test_the_tiny_model_of_the_other_tests_shares():
    assert prefix_shortcut(tiny.model(vocab_size=64))


def test_a_head_that_forbids_tokens_does_not_hide_a_bent_one():
    """One infinite logit must not make the tolerance infinite."""
    def forbidding(bend):
        model = tiny.model(vocab_size=64)
        plain = type(model).forward

        def bent(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.logits = bend(output.logits).index_fill(-1, torch.tensor([3]), -torch.inf)
            return output

        model.forward = bent.__get__(model)
        return model

    assert not head_shortcut(forbidding(lambda logits: logits.roll(1, -1) * 3))
    assert not head_shortcut(forbidding(lambda logits: logits))  # the head alone would not forbid it


def test_nothing_predicts_the_first_token():
    ids, mask = padded(grown())
    first = torch.zeros(1, dtype=torch.long)
    for ask in (forward_pass(LLAMA, ids, mask).logits, forward_pass(LLAMA, ids, mask).states_at):
        with pytest.raises(ValueError, match="token 0: nothing predicts"):
            ask(first, first)
