"""Sharing inside a model's own forward: the same states and gradients for every family, or the
plain pass with a reason.
"""

import contextlib

import pytest
import tiny
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from composer_nb.forward import shared_body
from composer_nb.forward.shared_body import RoomyLayer, sharing_prefixes, why_not

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=7)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, sliding_window=7)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128,
                                               attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    return FAMILIES[request.param]().eval()


def batch(left: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows over two prompts, ragged on the right, padded on the left by `left`."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 60, (2, 12), generator=generator)[[0, 1, 0, 0, 1, 1]]
    answers = torch.randint(3, 60, (6, 5), generator=generator)
    ids = torch.cat([torch.zeros(6, left, dtype=torch.long), prompts, answers], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :left], mask[1, -2:], mask[4, -4:] = 0, 0, 0
    return ids, mask


def logits_and_gradient(model, ids, mask, share):
    model.zero_grad()
    with sharing_prefixes(model) if share else contextlib.nullcontext() as calls:
        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    (logits.float().square().mean() + logits[::3].float().logsumexp(-1).mean()).backward()
    return (
        logits.detach(),
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        calls,
    )


@pytest.mark.parametrize("left", [0, 4])
def test_states_and_gradients_are_those_of_the_plain_pass(model, left):
    ids, mask = batch(left)
    logits, gradient, _ = logits_and_gradient(model, ids, mask, share=False)
    shared, own, calls = logits_and_gradient(model, ids, mask, share=True)
    assert (shared - logits).norm() < 1e-5 * logits.norm() and (
        own - gradient
    ).norm() < 1e-5 * gradient.norm()
    assert calls.positions < calls.plain_positions or calls.declined
    assert "forward" not in model.base_model.__dict__


def test_only_learned_positions_decline_left_padding(model):
    calls = logits_and_gradient(model, *batch(left=4), share=True)[2]
    assert bool(calls.declined) is isinstance(model, GPT2LMHeadModel)


def test_generation_is_token_for_token_the_same(model):
    ids, mask = batch()
    prompts, seen = ids[:, :12], mask[:, :12].clone()
    seen[[1, 4, 5], :2] = 0  # the second prompt is shorter
    options = dict(attention_mask=seen, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = model.generate(prompts, **options)
    with sharing_prefixes(model) as calls:
        found = model.generate(prompts, **options)
    assert torch.equal(found, expected) and calls.positions == 2 * 12 + 7 * 6


@pytest.mark.parametrize("how", [dict(do_sample=True), dict(num_beams=3)], ids=["sampled", "beams"])
@pytest.mark.parametrize("room", [1, 64])
def test_a_cache_with_room_samples_the_same_ids(model, monkeypatch, room, how):
    prompts = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))[[0, 0, 1, 1]]
    options = dict(attention_mask=torch.ones_like(prompts), max_new_tokens=8, pad_token_id=0, **how)
    found, copies, inner = [], [], shared_body.appended
    monkeypatch.setattr(shared_body, "ROOM", room)
    monkeypatch.setattr(
        shared_body, "appended", lambda h, n, r: copies.append(r is (out := inner(h, n, r))[1]) or out
    )
    for give in (shared_body.give_room, lambda cache: None):
        monkeypatch.setattr(shared_body, "give_room", give)
        torch.manual_seed(1)
        with torch.no_grad(), sharing_prefixes(model.eval()):
            out = model.generate(prompts, output_scores=True, return_dict_in_generate=True, **options)
        found.append(out)
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(found[0].scores, found[1].scores))
    if room == 64 and "do_sample" in how and copies:  # none where a family has layers of its own
        assert copies.count(False) == copies.count(True) / 6


def test_on_other_devices_only_large_layers_get_room(monkeypatch):
    """A copy of a small one takes no longer there than its launch."""
    monkeypatch.setattr(shared_body, "ROOM_FROM", 2 * 1 * 3 * 4 * 4)
    for device, columns, roomy in (("cpu", 1, True), ("meta", 2, False), ("meta", 3, True)):
        cache = DynamicCache()
        start = torch.zeros(2, 1, columns, 4, device=device)
        cache.update(start, start, 0)
        cache.layers.append(DynamicLayer())  # one that nothing was written to
        shared_body.give_room(cache)
        assert [type(layer) is RoomyLayer for layer in cache.layers] == [roomy, False], (device, columns)


def test_a_layer_with_room_falls_back_where_a_gradient_is_kept_or_types_differ():
    layer = RoomyLayer()
    start, more = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 1, 4, requires_grad=True)
    layer.update(start, start)
    keys, _ = layer.update(more, more)
    keys.sum().backward()
    assert torch.equal(more.grad, torch.ones_like(more)) and layer.rooms is None
    with torch.no_grad():
        assert layer.update(more.double(), more.double())[0].dtype == torch.float64 and layer.rooms is None
        same = layer.update(more.double(), more.double())[0]
        held, copied = layer.rooms[0].data_ptr(), layer.update(more.double(), more.double())[0]
    assert copied.data_ptr() == same.data_ptr() == held and copied.shape[-2] == 7


def test_bf16_is_equal_up_to_its_own_rounding():
    model = tiny.model(dtype=torch.bfloat16, vocab_size=64)
    ids, mask = batch()
    (logits, *_), (shared, *_) = (logits_and_gradient(model, ids, mask, share) for share in (False, True))
    assert (shared.float() - logits.float()).norm() < 0.03 * logits.float().norm()


def test_rows_that_share_nothing_run_plain_to_the_bit():
    model, (ids, mask) = tiny.model(vocab_size=64), batch()
    ids[:, 0] = torch.arange(3, 9)
    plain, shared = (logits_and_gradient(model, ids, mask, share) for share in (False, True))
    assert torch.equal(plain[0], shared[0]) and shared[2].positions == shared[2].plain_positions


def test_an_error_inside_leaves_the_model_as_it_was():
    model = tiny.model(vocab_size=64)
    with pytest.raises(KeyError), sharing_prefixes(model):
        raise KeyError("something else")
    assert "forward" not in model.base_model.__dict__


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.train() and setattr(m.config, "attention_dropout", 0.1), "attention dropout"),
        (lambda m: m.train() and m.base_model.layers[0].register_module("drop", torch.nn.Dropout(0.1)),
         "dropout is on"),
        (lambda m: m.train() and setattr(m.base_model, "gradient_checkpointing", True),
         "gradient checkpointing"),
    ],
)  # fmt: skip
def test_what_breaks_sharing_is_declined_by_name(change, reason):
    model = tiny.model(vocab_size=64)
    change(model)
    assert reason in why_not(model)
    model.eval()
    assert why_not(model) == ""


def test_embeddings_in_place_of_ids_run_plain():
    model, (ids, mask) = tiny.model(vocab_size=64), batch()
    with torch.no_grad(), sharing_prefixes(model) as calls:
        shared = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
    assert torch.equal(shared, model(input_ids=ids, attention_mask=mask).logits) and len(calls.declined) == 1


def test_prompts_that_are_more_than_tokens_are_not_merged():
    """Two rows with one text and two images would become one: tensors beside the ids keep the plain pass."""
    model, seen = tiny.model(vocab_size=64), []
    assert why_not(model) == ""  # looked at before its forward is watched
    body, own = model.base_model, model.base_model.forward
    body.forward = lambda *args, pixel_values=None, **rest: (
        seen.append(len(rest["input_ids"])) or own(*args, **rest)
    )
    ids = torch.randint(3, 60, (1, 6)).expand(4, -1)
    with torch.no_grad(), sharing_prefixes(model) as calls:
        body(input_ids=ids, past_key_values=DynamicCache(), use_cache=True, pixel_values=torch.randn(4, 3))
    assert seen == [4] and set(calls.declined) == {"called with pixel_values"}
    flat, deep = torch.zeros(4, 6), torch.zeros(4, 4, 6)  # some models number positions along several axes
    assert shared_body._odd_prompt({"position_ids": flat, "use_cache": True}) == ""
    assert shared_body._odd_prompt({"position_ids": deep}) == "called with position_ids"
    for pictures in ([torch.randn(3, 4)], {"features": torch.randn(3, 4)}):  # read before the prompt is
        assert shared_body._odd_prompt({"mm_encoder_outputs": pictures}) == "called with mm_encoder_outputs"


def test_a_cache_whose_rows_cannot_be_copied_runs_plain(monkeypatch):
    model = tiny.model(vocab_size=64)
    monkeypatch.setattr(shared_body, "can_continue", lambda lm, longest: False)
    ids = torch.randint(3, 60, (1, 6)).expand(4, -1)
    with torch.no_grad(), sharing_prefixes(model) as calls:
        found = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(found, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))
    assert any("continue exactly" in why for why in calls.declined)


def test_a_model_first_met_under_checkpointing_shares_afterwards():
    model = tiny.model(vocab_size=64).train()
    model.base_model.gradient_checkpointing = True
    with sharing_prefixes(model) as calls:
        model(input_ids=batch()[0], attention_mask=batch()[1])
    assert len(calls.declined) == 1
    model.base_model.gradient_checkpointing = False
    assert why_not(model) == ""


@pytest.mark.parametrize("asked", [dict(output_hidden_states=True), dict(use_cache=True)])
def test_what_a_shared_pass_cannot_hand_back_is_declined(asked):
    model, (ids, mask) = tiny.model(vocab_size=64), batch()
    assert why_not(model) == ""
    with torch.no_grad():
        plain = model.base_model(input_ids=ids, attention_mask=mask, **asked)
        with sharing_prefixes(model) as calls:
            shared = model.base_model(input_ids=ids, attention_mask=mask, **asked)
    assert shared.keys() == plain.keys() and calls.declined
    assert torch.equal(shared.last_hidden_state, plain.last_hidden_state)
