"""Channel 2 from hidden states equals the model's own logits through the reference, for families whose heads
differ.
"""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from composer_nb.distillation import fused
from composer_nb.distillation.divergence import generalized_jsd_loss
from composer_nb.loss import compose_loss, head_of

SMALL = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[]
)
FAMILIES = {
    "llama": dict(tie_word_embeddings=True), "qwen2": {}, "qwen3": dict(tie_word_embeddings=False),
    "mistral": dict(sliding_window=4), "gemma2": dict(final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "phi3": dict(rope_parameters=None), "phi": dict(tie_word_embeddings=False),
    "cohere": dict(logit_scale=0.25), "granite": dict(logits_scaling=4.0), "qwen3_moe": MOE,
}  # fmt: skip


def build(family, **changes):
    torch.manual_seed(0)
    options = {k: v for k, v in (SMALL | FAMILIES[family] | changes).items() if v is not None}
    if family == "phi":
        options.pop("head_dim")
    model = (
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **options), experts_implementation="eager"
        )
        .double()
        .eval()
    )
    with torch.no_grad():  # a head far from uniform, so that caps, scales and biases matter
        model.get_output_embeddings().weight.mul_(30.0)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model


def batch():
    """Two rollouts, the hinted contexts longer by five and three tokens, five and four compared tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, 12), generator=generator)
    hinted = torch.randint(3, 64, (2, 17), generator=generator)
    mask, hinted_mask = torch.ones_like(ids), torch.ones_like(hinted)
    hinted[0, 12:17], hinted[1, 11:15] = ids[0, 7:12], ids[1, 8:12]
    hinted[:, :4] = ids[:, :4]
    hinted_mask[1, 15:] = 0
    student_at, teacher_at = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    student_at[0], teacher_at[0] = torch.arange(7, 12), torch.arange(12, 17)
    student_at[1, :4], teacher_at[1, :4] = torch.arange(8, 12), torch.arange(11, 15)
    response = torch.zeros_like(ids)
    response[:, 6:] = 1
    return {
        "input_ids": ids, "attention_mask": mask, "response_mask": response, "ctx_teacher_input_ids": hinted,
        "ctx_teacher_attention_mask": hinted_mask,
        "sdpo_loss_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool),
        "student_response_idx": student_at,
        "teacher_response_idx": teacher_at,
    }  # fmt: skip


def by_hand(model, inputs, beta):
    """The hint loss from the model's own logits."""
    mask = inputs["sdpo_loss_mask"]
    row = torch.arange(2).unsqueeze(1)
    student = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[
        row, inputs["student_response_idx"] - 1
    ]
    with torch.no_grad():
        hinted = model(
            input_ids=inputs["ctx_teacher_input_ids"], attention_mask=inputs["ctx_teacher_attention_mask"]
        )
    return generalized_jsd_loss(
        student, hinted.logits[row, inputs["teacher_response_idx"] - 1], mask=mask, beta=beta
    )


def all_gradients(loss, model):
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True)
    ]


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradients_are_the_models_own(family, beta, monkeypatch):
    model, inputs, streams = build(family), batch(), []
    real = fused._Stream.apply
    monkeypatch.setattr(fused._Stream, "apply", lambda *args: streams.append(1) or real(*args))
    ours = compose_loss(model, inputs, alpha_sdpo=1.0, sdpo_jsd_beta=beta).sdpo_jsd
    assert streams == [1] and head_of(model) is not None
    expected = by_hand(model, inputs, beta)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9) and expected.item() > 1e-3
    for mine, theirs in zip(all_gradients(ours, model), all_gradients(expected, model), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-10)


def test_adapters_on_the_head_fall_back_to_the_models_own_logits():
    model = get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert head_of(model) is None
    inputs = batch()
    with pytest.warns(UserWarning, match="cannot be streamed"):
        ours = compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compose_loss(model, inputs, alpha_sdpo=1.0)  # said once
    expected = by_hand(model, inputs, 0.5)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)
    for mine, theirs in zip(all_gradients(ours, model), all_gradients(expected, model), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-10)


def test_adapters_on_the_body_stream_with_a_frozen_head():
    model = get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert not head_of(model).weight.requires_grad
    inputs = batch()
    ours, expected = compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd, by_hand(model, inputs, 0.5)
    for mine, theirs in zip(all_gradients(ours, model), all_gradients(expected, model), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-10) and theirs.abs().max() > 0


def test_a_padded_vocabulary_counts_as_the_model_counts_it():
    model, inputs = build("llama", vocab_size=80), batch()
    ours, expected = compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd, by_hand(model, inputs, 0.5)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)
