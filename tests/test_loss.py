"""compose_loss: off means off, every cut gives the same gradient, wrong input is named."""

import dataclasses

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)
from trl import GRPOConfig

from composer_nb.batch import ComposerDataCollator, DPOPair, Rollout, build_batch
from composer_nb.forward import encode_sequences, head_shortcut
from composer_nb.hints import encode, render
from composer_nb.loss import (
    PRESETS,
    RETIRED,
    LossConfig,
    channel_gradient_norms,
    compose_loss,
    reference_logprobs,
)
from composer_nb.loss.config import TRL_KINDS, TRL_OPTIONS

TOKENIZER = tiny.tokenizer()
REQUESTS = (
    "Count the lines of README.md.",
    "Find parser.",
    "Remove the file build.log, please, and nothing else.",
)
ANSWERS = ("wc README.md", "search('parser')", "rm build.log now")


def rollouts() -> list[Rollout]:
    """Three ragged rollouts; the last two carry a hint."""
    made = []
    for number, (request, answer) in enumerate(zip(REQUESTS, ANSWERS, strict=True)):
        context = [{"role": "user", "content": request}]
        prompt, said = encode(TOKENIZER, render(TOKENIZER, context)), encode(TOKENIZER, answer)
        hint = f"Reminder {number}: name a tool." if number else ""
        made.append(
            Rollout(prompt + said, [0] * len(prompt) + [1] * len(said), hint=hint, site_context=context)
        )
    return made


def pairs() -> list[DPOPair]:
    return [
        DPOPair(str(i), [{"role": "user", "content": r}], chosen=f"call({i})", rejected=a)
        for i, (r, a) in enumerate(zip(REQUESTS, ANSWERS, strict=True))
    ]


def full_batch(model, padding_side="right", **kwargs):
    batch = ComposerDataCollator(TOKENIZER, padding_side=padding_side, **kwargs)(rollouts(), pairs())
    return batch | {name: value - 0.5 for name, value in reference_logprobs(model, batch).items()}


def gradients(model, batch, **options):
    model.zero_grad()
    parts = compose_loss(model, batch, **options)
    parts.total.backward()
    return parts, torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def close(a: torch.Tensor, b: torch.Tensor, rel: float = 1e-5) -> bool:
    return ((a - b).norm() / b.norm()).item() < rel


LIT = dict(alpha_sdpo=0.7, beta_replay=0.3)


def test_all_three_channels_have_gradients():
    model = tiny.model()
    parts = compose_loss(model, full_batch(model), **LIT)
    norms = channel_gradient_norms(
        {"policy": parts.lm_ce, "sdpo": parts.sdpo_jsd, "replay": parts.trace_replay_dpo}, model.parameters()
    )
    assert min(norms.values()) > 0 and parts.dark == ()
    weighted = parts.lm_ce + 0.7 * parts.sdpo_jsd + 0.3 * parts.trace_replay_dpo
    assert torch.allclose(parts.total, weighted)


@pytest.mark.parametrize("present", [True, False])
def test_a_channel_that_is_off_changes_no_bit(present):
    model = tiny.model()
    batch = full_batch(model)
    bare = {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask")}
    _, reference = gradients(model, bare, alpha_sdpo=0.0, beta_replay=0.0)
    off = (
        gradients(model, batch, alpha_sdpo=0.0, beta_replay=0.0) if present else gradients(model, bare, **LIT)
    )
    assert torch.equal(off[1], reference)
    assert torch.equal(off[0].total, off[0].lm_ce)


def test_a_weighted_channel_without_input_is_called_dark():
    model = tiny.model()
    batch = full_batch(model)
    bare = {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask")}
    assert compose_loss(model, bare, **LIT).dark == ("sdpo", "replay")
    masked = batch | {"sdpo_loss_mask": torch.zeros_like(batch["sdpo_loss_mask"])}
    assert compose_loss(model, masked, **LIT).dark == ("sdpo",)


def test_padding_side_changes_nothing_beyond_rounding():
    model = tiny.model()
    right, left = (gradients(model, full_batch(model, side), **LIT) for side in ("right", "left"))
    assert torch.allclose(right[0].total, left[0].total, rtol=1e-5) and close(right[1], left[1])


def test_more_padding_changes_nothing_beyond_rounding():
    model = tiny.model()
    batch = full_batch(model)
    wider = dict(batch)
    for name in (
        "input_ids",
        "attention_mask",
        "response_mask",
        "ctx_teacher_input_ids",
        "ctx_teacher_attention_mask",
    ):
        wider[name] = torch.nn.functional.pad(batch[name], (0, 7))
    assert close(gradients(model, wider, **LIT)[1], gradients(model, batch, **LIT)[1])


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(3)), st.sampled_from([(1, 2), (2, 1), (1, 1, 1)]))
def test_every_order_and_cut_gives_the_full_gradient(order, sizes):
    model = tiny.model()
    collate = ComposerDataCollator(TOKENIZER)
    whole = full_batch(model)
    parts, expected = gradients(model, whole, **LIT)
    total, start = 0, 0
    for size in sizes:
        rows = order[start : start + size]
        start += size
        batch = collate([rollouts()[i] for i in rows], [pairs()[i] for i in rows])
        batch |= {
            f"dpo_{s}_ref_logprobs": whole[f"dpo_{s}_ref_logprobs"][rows] for s in ("chosen", "rejected")
        }
        total = total + gradients(model, batch, counts=parts.scored, **LIT)[1]
    assert close(total, expected)


def test_accumulation_of_policy_losses_with_sequence_counts():
    model = tiny.model()
    batch = full_batch(model) | {"advantages": torch.tensor([1.0, -0.5, 2.0])}
    batch = {k: v for k, v in batch.items() if not k.startswith(("dpo", "ctx"))}
    for kind in ("grpo", "dapo"):
        _, whole = gradients(model, batch, policy_kind=kind)
        count = 3 if kind == "grpo" else batch["response_mask"].sum()
        pieces = [
            gradients(
                model, {k: v[i : i + 1] for k, v in batch.items()}, policy_kind=kind, counts={"policy": count}
            )[1]
            for i in range(3)
        ]
        assert close(sum(pieces), whole)


def test_everything_masked_is_exactly_zero_with_finite_gradients():
    model = tiny.model()
    batch = full_batch(model)
    for name in ("response_mask", "sdpo_loss_mask", "dpo_chosen_response_mask", "dpo_rejected_response_mask"):
        batch[name] = torch.zeros_like(batch[name])
    batch |= {f"dpo_{s}_ref_logprobs": torch.zeros(3) for s in ("chosen", "rejected")}
    parts, gradient = gradients(model, batch, alpha_sdpo=1.0)
    assert parts.total.item() == 0 and torch.equal(gradient, torch.zeros_like(gradient))


def test_identical_teacher_without_a_hint_in_context_is_zero():
    model = tiny.model(dtype=torch.float64)  # an untrained model hardly reads its hint
    batch = full_batch(model)
    apart = compose_loss(model, batch, alpha_sdpo=1.0)
    batch |= {
        "ctx_teacher_input_ids": batch["input_ids"],
        "ctx_teacher_attention_mask": batch["attention_mask"],
        "teacher_response_idx": batch["student_response_idx"],
    }
    alike = compose_loss(model, batch, alpha_sdpo=1.0)
    assert alike.scored["sdpo"] == apart.scored["sdpo"] > 0  # the same tokens, and only the context differs
    assert alike.sdpo_jsd.abs() < 1e-3 * apart.sdpo_jsd


def test_a_shifted_teacher_is_refused():
    model = tiny.model()
    batch = full_batch(model)
    batch["teacher_response_idx"] = batch["teacher_response_idx"] - 1
    with pytest.raises(ValueError, match="different tokens"):
        compose_loss(model, batch, alpha_sdpo=1.0)


@pytest.mark.parametrize("options",
                         [dict(sdpo_wrapper="taid", taid_t=0.5), dict(sdpo_wrapper="entropy_opd"),
                          dict(sdpo_wrapper="eopd"),
                                     dict(dpo_variant="simpo"), dict(sdpo_top_k=20),
                          dict(sdpo_token_clip=0.01)])  # fmt: skip
def test_variants_run_and_pull(options):
    model = tiny.model()
    parts, gradient = gradients(model, full_batch(model), **LIT, **options)
    assert torch.isfinite(parts.total) and gradient.norm() > 0


def test_both_spellings_of_the_configuration_agree():
    model = tiny.model()
    batch = full_batch(model)
    one = compose_loss(model, batch, LossConfig(**LIT)).total
    assert torch.equal(one, compose_loss(model, batch, **LIT).total)
    for name in PRESETS:
        assert LossConfig.preset(name) == LossConfig(**PRESETS[name])
    assert LossConfig.preset("seed", alpha_sdpo=3.0).alpha_sdpo == 3.0


@pytest.mark.parametrize(
    "options, error, says",
    [
        (dict(alpha_sdpo=-0.1), ValueError, "alpha_sdpo=-0.1"),
        (dict(beta_replay=float("nan")), ValueError, "beta_replay=nan"),
        (dict(alpha_sdpo=float("inf")), ValueError, "finite"),
        (dict(taid_t=1.5, sdpo_wrapper="taid"), ValueError, "taid_t=1.5"),
        (dict(taid_t=float("nan"), sdpo_wrapper="taid"), ValueError, "taid_t=nan"),
        (dict(taid_t=0.5), ValueError, "go together"),
        (dict(sdpo_jsd_beta=2.0), ValueError, "sdpo_jsd_beta=2.0"),
        (dict(sdpo_temperature=0.0), ValueError, "sdpo_temperature"),
        (dict(dpo_variant="ipo"), ValueError, "dpo_variant='ipo'"),
        (dict(alpha_spdo=0.1), TypeError, "alpha_sdpo"),
        *[({name: 1}, TypeError, "retired") for name in RETIRED],
        *[({name: 1}, TypeError, f"ComposerConfig.{name}=") for name in TRL_OPTIONS],
        *[(dict(policy_kind=k), ValueError, f"ComposerConfig.loss_type='{k}'") for k in TRL_KINDS],
    ],
)
def test_wrong_options_are_named(options, error, says):
    with pytest.raises(error, match=says):
        LossConfig.resolve(**options)


def test_what_is_refused_as_trls_is_a_field_of_trls_configuration():
    known = {f.name: f for f in dataclasses.fields(GRPOConfig)}
    assert set(TRL_OPTIONS) <= set(known) and not set(TRL_OPTIONS) & {
        f.name for f in dataclasses.fields(LossConfig)
    }
    assert all(kind in known["loss_type"].metadata["help"] for kind in TRL_KINDS)


def test_dpo_without_references_says_what_to_add():
    model = tiny.model()
    batch = {k: v for k, v in full_batch(model).items() if not k.endswith("ref_logprobs")}
    with pytest.raises(ValueError, match="reference_logprobs"):
        compose_loss(model, batch, beta_replay=1.0)


def test_build_batch_lights_every_channel_on_both_sides():
    model = tiny.model()
    for side in ("right", "left"):
        batch = build_batch(TOKENIZER, padding_side=side)
        batch |= reference_logprobs(model, batch)
        assert compose_loss(model, batch, **LIT).sdpo_jsd > 0


SMALL = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1)  # fmt: skip
FAMILIES = {
    "llama": lambda: tiny.model(vocab_size=64),
    "gemma2 (soft cap)": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.05)
    ),
    "cohere (logit scale)": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "granite (logits scaling)": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "gpt2 (absolute positions)": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_models_own_logits(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    batch, token = torch.tensor([0, 1, 1]), torch.tensor([3, 8, 1])
    encoded = encode_sequences(model, ids, mask)
    own = model(input_ids=ids, attention_mask=mask).logits[batch, token - 1]
    assert torch.allclose(encoded.logits(batch, token), own, atol=1e-5)
    assert head_shortcut(model)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().alpha_sdpo = 1.0


def test_the_head_check_works_under_autocast():
    model = tiny.model(seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head_shortcut(model)
        parts = compose_loss(model, full_batch(model), **LIT)
    assert parts.sdpo_jsd > 0 and parts.sdpo_jsd.dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        dict(sdpo_sampled=True),
        dict(sdpo_sampled=True, sdpo_jsd_beta=1.0, sdpo_top_k=3),
        dict(sdpo_gate=-1.0),
        dict(kl_coef=float("inf")),
        dict(replay_label_smoothing=0.7),
        dict(sdpo_reduction="mean"),
        dict(sdpo_reduction="seq-mean-token-mean", sdpo_wrapper="eopd"),
        dict(sdpo_gate=1.0, sdpo_wrapper="taid", taid_t=0.5),
        dict(kl_estimator="k4"),
        dict(replay_loss_type="ipo"),
    ],
)
def test_options_without_meaning_are_refused(options):
    with pytest.raises(ValueError, match="|".join(options)):
        LossConfig(**options)


def test_means_over_sequences_weigh_turns_equally():
    model = tiny.model(dtype=torch.float64)
    batch = full_batch(model)
    rows = batch["sdpo_loss_mask"].any(1).nonzero().flatten()
    alone = [
        compose_loss(
            model, {k: v[r : r + 1] for k, v in batch.items() if not k.startswith("dpo_")}, alpha_sdpo=1.0
        )
        for r in rows
    ]
    both = compose_loss(model, batch, alpha_sdpo=1.0, sdpo_reduction="seq-mean-token-mean")
    assert len(rows) == 2 and len({part.scored["sdpo"] for part in alone}) == 2 and both.scored["sdpo"] == 2
    assert both.sdpo_jsd.item() == pytest.approx(sum(part.sdpo_jsd.item() for part in alone) / 2, rel=1e-4)


def test_length_normalised_dpo_divides_both_models_sums():
    model, other = tiny.model(), tiny.model(seed=1)
    batch = full_batch(model) | reference_logprobs(other, full_batch(model))
    lengths = [batch[f"dpo_{side}_response_mask"][:, 1:].sum(1) for side in ("chosen", "rejected")]
    sums = [
        reference_logprobs(m, batch)[f"dpo_{side}_ref_logprobs"] / n
        for m in (model, other)
        for side, n in zip(("chosen", "rejected"), lengths, strict=True)
    ]
    margin = 0.5 * ((sums[0] - sums[2]) - (sums[1] - sums[3]))
    parts = compose_loss(model, batch, beta_replay=1.0, replay_dpo_beta=0.5, replay_length_normalised=True)
    assert parts.trace_replay_dpo.item() == pytest.approx(
        -torch.nn.functional.logsigmoid(margin).mean().item(), rel=1e-4
    )
    hinge = compose_loss(
        model,
        batch,
        beta_replay=1.0,
        replay_dpo_beta=0.5,
        replay_length_normalised=True,
        replay_loss_type="hinge",
    )
    assert hinge.trace_replay_dpo.item() == pytest.approx((1 - margin).relu().mean().item(), rel=1e-4)


@pytest.mark.parametrize("variant", ["dpo", "simpo"])
def test_the_chosen_reply_is_kept_likely_by_its_own_mean(variant):
    """Each pair's cross entropy is that of its own tokens, whatever the lengths; micro-batches add up."""
    model, other = tiny.model(), tiny.model(seed=1)
    batch = full_batch(model)
    last = batch["dpo_chosen_response_mask"][0].nonzero()[-2:, 0]
    batch["dpo_chosen_response_mask"][0, last] = 0  # a shorter reply among longer ones
    batch |= reference_logprobs(other, batch)
    options = dict(beta_replay=1.0, dpo_variant=variant)
    plain = compose_loss(model, batch, **options)
    found = compose_loss(model, batch, replay_nll=0.7, **options)
    lengths = batch["dpo_chosen_response_mask"][:, 1:].sum(1)
    sums = reference_logprobs(model, batch)["dpo_chosen_ref_logprobs"]
    nll = -(sums / lengths).mean()
    assert len(set(lengths.tolist())) > 1
    wanted = plain.trace_replay_dpo + 0.7 * nll
    assert found.trace_replay_dpo.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert found.metrics["nll"] == pytest.approx(nll.item(), rel=1e-5) and "nll" not in plain.metrics
    halves = compose_loss(model, batch, replay_nll=0.7, counts={"replay": 2 * len(lengths)}, **options)
    assert 2 * halves.trace_replay_dpo.item() == pytest.approx(found.trace_replay_dpo.item(), rel=1e-5)


def test_a_leash_pulls_the_policy_channel():
    model = tiny.model()
    batch = full_batch(model)
    shape = batch["input_ids"].shape
    batch |= {
        "advantages": torch.zeros(len(shape) and shape[0]),
        "ref_logprobs": torch.full(shape, -3.0),
        "old_logprobs": torch.full(shape, -3.0),
    }
    free = compose_loss(model, batch)
    held = compose_loss(model, batch, kl_coef=0.1)
    assert (
        free.total.item() == 0.0
        and channel_gradient_norms({"policy": held.total}, model.parameters())["policy"] > 0
    )


def test_the_fused_path_is_the_reference_path():
    model = tiny.model(dtype=torch.float64)
    batch = full_batch(model)
    for options in (dict(), dict(sdpo_top_k=5), dict(sdpo_gate=5.0), dict(sdpo_wrapper="taid", taid_t=0.3)):
        fused, plain = (
            compose_loss(model, batch, alpha_sdpo=1.0, sdpo_fused=way, **options) for way in (True, False)
        )
        assert fused.sdpo_jsd.item() == pytest.approx(plain.sdpo_jsd.item(), rel=1e-9)
        for a, b in zip(
            *(torch.autograd.grad(p.sdpo_jsd, list(model.parameters())) for p in (fused, plain)), strict=True
        ):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-12)
