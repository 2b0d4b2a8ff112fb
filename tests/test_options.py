"""No option is ever ignored: each field of the loss's and of the trainer's configuration changes
something, or raises.
"""

import dataclasses
import re
import warnings
from types import SimpleNamespace

import pytest
import test_loss
import test_trainer
import tiny
import torch
from test_loss import full_batch
from test_trainer import PAIRS, arguments, build, feedback, lit
from transformers import TrainingArguments
from trl import GRPOConfig

from composer_nb.batch import Padding, verified_rows
from composer_nb.distillation.taid import TAIDScheduler
from composer_nb.loss import LossConfig, compose_loss
from composer_nb.loss.config import HintOptions, PolicyTermOptions, PreferenceOptions
from composer_nb.training.config import ComposerConfig, adopt, refuse_without_calls, scheduled
from composer_nb.training.feedback import Feedback
from composer_nb.training.pairs import backward_first

# --- the loss ---------------------------------------------------------------------------------------

LIT = dict(alpha_sdpo=0.7, beta_replay=0.3)
# Another value for each field, with what must stand beside it to give it a meaning.
OTHER = {
    "alpha_sdpo": dict(alpha_sdpo=0.2),
    "hint_mode": dict(hint_mode="verified"),
    "sdpo_jsd_beta": dict(sdpo_jsd_beta=0.1),
    "sdpo_temperature": dict(sdpo_temperature=2.0),
    "sdpo_token_clip": dict(sdpo_token_clip=1e-6),
    "sdpo_entry_clip": dict(sdpo_entry_clip=1e-9),
    "sdpo_top_k": dict(sdpo_top_k=3),
    "sdpo_top_k_source": (dict(sdpo_top_k=3), dict(sdpo_top_k=3, sdpo_top_k_source="teacher")),
    "sdpo_tail": (dict(sdpo_top_k=3), dict(sdpo_top_k=3, sdpo_tail=False)),
    "sdpo_sampled": (dict(sdpo_jsd_beta=1.0), dict(sdpo_jsd_beta=1.0, sdpo_sampled=True)),
    "sdpo_is_cap": dict(sdpo_is_cap=0.5),
    "sdpo_gate": dict(sdpo_gate=5.0),
    "sdpo_reduction": dict(sdpo_reduction="seq-mean-token-mean"),
    "sdpo_wrapper": dict(sdpo_wrapper="eopd"),
    "taid_t": (dict(sdpo_wrapper="taid", taid_t=0.3), dict(sdpo_wrapper="taid", taid_t=0.8)),
    "entropy_opd_h_max": (
        dict(sdpo_wrapper="entropy_opd"),
        dict(sdpo_wrapper="entropy_opd", entropy_opd_h_max=20.0),
    ),
    "beta_replay": dict(beta_replay=0.9),
    "dpo_variant": dict(dpo_variant="simpo"),
    "replay_loss_type": dict(replay_loss_type="hinge"),
    "replay_label_smoothing": dict(replay_label_smoothing=0.2),
    "replay_dpo_beta": dict(replay_dpo_beta=0.5),
    "replay_length_normalised": dict(replay_length_normalised=True),
    "replay_nll": dict(replay_nll=0.5),
    "simpo_beta": (dict(dpo_variant="simpo"), dict(dpo_variant="simpo", simpo_beta=1.0)),
    "simpo_gamma": (dict(dpo_variant="simpo"), dict(dpo_variant="simpo", simpo_gamma=0.2)),
    "policy_kind": dict(policy_kind="gspo"),
    "epsilon_low": dict(epsilon_low=0.5),
    "epsilon_high": dict(epsilon_high=0.9),
    "max_completion_length": (
        dict(policy_kind="dr_grpo", max_completion_length=9),
        dict(policy_kind="dr_grpo", max_completion_length=12),
    ),
    "kl_coef": dict(kl_coef=0.5),
    "kl_estimator": (dict(kl_coef=0.5), dict(kl_coef=0.5, kl_estimator="k3")),
}


@pytest.fixture(scope="module", autouse=True)
def all_words():
    """Of all words are the answers that pass when they are taken again, and those that do not."""
    with pytest.MonkeyPatch.context() as own:
        for room in (test_loss, test_trainer):
            own.setattr(room, "TOKENIZER", tiny.tokenizer(whole=True))
        own.setattr(tiny, "WORDS", tiny.WHOLE)
        yield


@pytest.fixture(scope="module")
def everything() -> SimpleNamespace:
    """A model and a batch in which every option has something to act on: advantages of both signs, ratios
    beyond both clips, a reference.
    """
    model = tiny.model()
    batch = full_batch(model)
    torch.manual_seed(0)
    shape = batch["input_ids"].shape
    logps = -torch.rand(shape) * 2 - 9.5
    more = {
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "old_logprobs": logps,
        "ref_logprobs": logps - torch.rand(shape),
    }
    more |= verified_rows([[5, 6, 7]] * 3, [[8, 9], [], [10]], Padding("right", 0))
    return SimpleNamespace(model=model, teacher=tiny.model(seed=1), batch=batch | more)


def loss_and_gradient(at: SimpleNamespace, **options: object) -> torch.Tensor:
    at.model.zero_grad()
    parts = compose_loss(at.model, at.batch, teacher=at.teacher, **(LIT | options))
    parts.total.backward()
    gradient = torch.cat([p.grad.flatten() for p in at.model.parameters()])
    return torch.cat([parts.total.detach().view(1), gradient])


def test_the_table_has_every_field_of_the_loss() -> None:
    assert OTHER.keys() | {"sdpo_fused"} == {f.name for f in dataclasses.fields(LossConfig)}


@pytest.mark.parametrize("name", OTHER)
def test_every_field_of_the_loss_changes_it(everything: SimpleNamespace, name: str) -> None:
    given = OTHER[name]
    before, after = given if isinstance(given, tuple) else ({}, given)
    found = [loss_and_gradient(everything, **options) for options in (before, after)]
    assert not torch.equal(*found), f"{name} changed nothing"


def test_streaming_is_a_way_to_compute_and_no_other_loss(everything: SimpleNamespace) -> None:
    streamed, whole = (loss_and_gradient(everything, sdpo_fused=fused) for fused in (True, False))
    assert (streamed - whole).norm() < 1e-4 * whole.norm()


# One setting for each way through the loss; every field is changed under each of them.
WAYS = {
    "plain": {}, "dr_grpo": dict(policy_kind="dr_grpo", max_completion_length=9),
    "bnpo": dict(policy_kind="bnpo"), "dapo": dict(policy_kind="dapo"), "gspo": dict(policy_kind="gspo"),
    "cispo": dict(policy_kind="cispo"), "kl": dict(kl_coef=0.5), "verified": dict(hint_mode="verified"),
    "gated": dict(hint_mode="gated"), "top_k": dict(sdpo_top_k=3),
    "sampled": dict(sdpo_jsd_beta=1.0, sdpo_sampled=True), "simpo": dict(dpo_variant="simpo"),
    "taid": dict(sdpo_wrapper="taid", taid_t=0.3), "entropy_opd": dict(sdpo_wrapper="entropy_opd"),
    "eopd": dict(sdpo_wrapper="eopd"), "cross-entropy": {}, "sampled just now": {},
}  # fmt: skip
LEFT_OUT = {"cross-entropy": {"advantages", "old_logprobs"}, "sampled just now": {"old_logprobs"}}
# Where the sampling weights are the present ones every ratio is 1: nothing is clipped, and gspo is grpo.
SAME = {"sampled just now": ["policy_kind", "epsilon_low", "epsilon_high"]}


@pytest.mark.parametrize("way", WAYS)
def test_every_field_changes_every_way_through_the_loss_or_is_refused_by_name(
    everything: SimpleNamespace, way: str
) -> None:
    at = SimpleNamespace(model=everything.model, teacher=everything.teacher,
                         batch={n: v for n, v in everything.batch.items()
                                if n not in LEFT_OUT.get(way, ())})  # fmt: skip
    before, silent = loss_and_gradient(at, **WAYS[way]), []
    for name, given in OTHER.items():
        changed = (given[1] if isinstance(given, tuple) else given)[name]
        if changed == getattr(LossConfig(**(LIT | WAYS[way])), name):
            continue
        try:
            after = loss_and_gradient(at, **(WAYS[way] | {name: changed}))
        except ValueError as error:
            assert name in str(error) or str(changed) in str(error), f"{name}: {error}"
            continue
        if torch.equal(before, after):
            silent.append(name)
    assert sorted(silent) == sorted(SAME.get(way, []))


@pytest.mark.parametrize(
    "options",
    [
        dict(sdpo_top_k_source="teacher"), dict(sdpo_tail=False), dict(entropy_opd_h_max=1.0),
        dict(simpo_gamma=0.3), dict(simpo_beta=1.0), dict(dpo_variant="simpo", replay_dpo_beta=0.3),
        dict(taid_t=0.3), dict(dpo_variant="simpo", replay_length_normalised=True),
        dict(sdpo_wrapper="eopd", sdpo_jsd_beta=0.2),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no effect|go together"):
        LossConfig(**options)


def test_the_groups_share_no_field() -> None:
    groups = [
        {f.name for f in dataclasses.fields(g)} for g in (HintOptions, PreferenceOptions, PolicyTermOptions)
    ]
    assert len(set.union(*groups)) == sum(map(len, groups))


# --- the trainer ------------------------------------------------------------------------------------

OWN = [
    f.name
    for f in dataclasses.fields(ComposerConfig)
    if f.name not in {g.name for g in dataclasses.fields(type(arguments("x")))}
]
VERIFIED = dict(
    hint_mode="verified", teacher="live", retake_pass=0.5,
    feedback_func=lambda completions, **_: (
        [Feedback("Reminder: say the colour.", kind="colour")] * len(completions)),
)  # fmt: skip
# Options of the trainer that are not the loss's: before, after, and further settings of both.
TRAINED = {
    "teacher": ({}, dict(teacher="frozen")),
    "teacher_ema_rate": ({}, dict(teacher_ema_rate=0.9)),
    "placement": ({}, dict(placement="system")),
    "rlsd": ({}, dict(rlsd=0.9)),
    "rlsd_steps": (dict(rlsd=0.9), dict(rlsd=0.9, rlsd_steps=1)),
    "kl_estimator": (dict(trl=dict(beta=50.0)), dict(trl=dict(beta=50.0), kl_estimator="k1")),
    "advantages": (
        dict(trl=dict(scale_rewards="none")),
        dict(trl=dict(scale_rewards="none"), advantages="rloo"),
    ),
    "policy_loss": (dict(trl=dict(num_iterations=2)), dict(trl=dict(num_iterations=2), policy_loss="dppo")),
    "alpha_schedule": ({}, dict(alpha_schedule="linear")),
    "alpha_until": (dict(alpha_schedule="linear"), dict(alpha_schedule="linear", alpha_until=0.5)),
    "beta_schedule": ({}, dict(beta_schedule="cosine")),
    "beta_until": (dict(beta_schedule="cosine"), dict(beta_schedule="cosine", beta_until=0.5)),
    "taid_schedule": (
        dict(sdpo_wrapper="taid", taid_t=0.4),
        dict(sdpo_wrapper="taid", taid_schedule="linear"),
    ),
    "pairs_per_step": ({}, dict(pairs_per_step=4)),
    "retakes": (VERIFIED, VERIFIED | dict(retakes=2)),
    "retake_pass": (VERIFIED, VERIFIED | dict(retake_pass=0.8)),
    "retake_rest": (VERIFIED, VERIFIED | dict(retake_rest=2)),
    "retake_repeats": (VERIFIED, VERIFIED | dict(retake_repeats=2)),
    "retake_temperature": (VERIFIED, VERIFIED | dict(retake_temperature=0.0)),
}
# What a run says rather than how it trains: these change the log, not the weights.
REPORTED = {"lift_steps": "sdpo/lift", "grad_norm_steps": "sdpo/grad_norm"}
LOSS_FIELDS = {f.name for g in (HintOptions, PreferenceOptions) for f in dataclasses.fields(g)}


def test_the_table_has_every_field_of_the_trainer() -> None:
    rest = set(OWN) - LOSS_FIELDS - TRAINED.keys() - REPORTED.keys()
    # Tested in test_trainer and test_idle_rows (a warning, and equal gradients) and in test_gated.
    gate = {"gate_tokens", "gate_memory", "gate_errors", "gate_cap"}
    assert rest == {"dark_steps", "share_prefixes", "skip_idle_rows"} | gate


def weights_after(folder, trl=None, **options) -> torch.Tensor:
    model = tiny.saved_model(folder / "model")
    trainer = lit(
        folder,
        model=model,
        options=dict(max_steps=3) | (trl or {}),
        grad_norm_steps=options.pop("grad_norm_steps", 0),
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run too short for TAID says so
        trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> torch.Tensor:
    """Weights after a run without any of the options."""
    return weights_after(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("name", TRAINED)
def test_every_field_of_the_trainer_changes_the_run(tmp_path, usual, name) -> None:
    first, second = TRAINED[name]
    before = weights_after(tmp_path / "before", **first) if first else usual
    after = weights_after(tmp_path / "after", **second)
    assert not torch.equal(before, after), f"{name} changed nothing"


@pytest.mark.parametrize("name", sorted(LOSS_FIELDS - {"sdpo_fused"}))
def test_the_trainer_hands_every_field_of_the_loss_on(tmp_path, name) -> None:
    given = OTHER[name]
    after = LIT | (given[1] if isinstance(given, tuple) else given)
    after |= dict(teacher="live") if name == "hint_mode" else {}
    assert getattr(adopt(arguments(tmp_path), after).loss_config(), name) == after[name]


@pytest.mark.parametrize("name", REPORTED)
def test_every_field_of_the_report_shows_in_the_log(tmp_path, name) -> None:
    logs = []
    for value in (0, 1):
        trainer = lit(
            tmp_path / str(value), **(dict(grad_norm_steps=0) | {name: value}), options=dict(max_steps=1)
        )
        trainer.train()
        logs.append(set().union(*trainer.state.log_history))
    assert REPORTED[name] not in logs[0] and REPORTED[name] in logs[1]


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(kl_estimator="k1"), "beta=0"),
        (dict(advantages="rloo"), "scale_rewards"),
        (dict(alpha_until=0.5), "alpha_until"),
        (dict(taid_schedule="linear"), "sdpo_wrapper='taid'"),
        (dict(teacher="live", teacher_ema_rate=0.2), "teacher_ema_rate"),
        (dict(policy_loss="dppo", trl=dict(loss_type="grpo")), "loss_type='grpo'"),
        (dict(policy_loss="dppo", trl=dict(delta=2.0)), "delta"),
        (dict(policy_loss="dppo", trl=dict(beta=0.1)), "beta=0.1"),
        (
            dict(trl=dict(max_tool_calling_iterations=2)),
            "max_tool_calling_iterations=2 has no effect without tools",
        ),
    ],
)
def test_combinations_without_sense_are_refused_when_the_trainer_is_built(tmp_path, options, says) -> None:
    trl = options.pop("trl", {})
    with pytest.raises(ValueError, match=says):
        build(tmp_path, options=trl, **options)


# Fields of TRL's that another one leaves aside: a value, what makes it speak, and what else keeps it silent.
UNREAD = {
    "ref_model_mixup_alpha": (0.5, dict(sync_ref_model=True, beta=0.1)),
    "ref_model_sync_steps": (8, dict(sync_ref_model=True, beta=0.1)),
    "entropy_coef_min": (0.1, dict(use_adaptive_entropy=True)),
    "entropy_coef_max": (0.5, dict(use_adaptive_entropy=True)),
    "entropy_coef_delta": (0.1, dict(use_adaptive_entropy=True)),
    "entropy_target": (1.0, dict(use_adaptive_entropy=True)),
    "sapo_temperature_neg": (2.0, dict(loss_type="sapo")),
    "sapo_temperature_pos": (2.0, dict(loss_type="sapo")), "vespo_k_pos": (1.0, dict(loss_type="vespo")),
    "vespo_lambda_pos": (1.0, dict(loss_type="vespo")), "vespo_k_neg": (1.0, dict(loss_type="vespo")),
    "vespo_lambda_neg": (1.0, dict(loss_type="vespo")),
    "delta": (2.0, dict(loss_type="grpo"), dict(loss_type="cispo")),
    "epsilon": (0.3, {}, dict(loss_type="sapo")),
    "epsilon_high": (0.3, dict(loss_type="cispo"), dict(loss_type="vespo")),
    "use_bias_correction_kl": (False, dict(beta=0.1)),
    "log_unique_prompts": (True, dict(log_completions=True)),
    "num_completions_to_print": (3, dict(log_completions=True)),
    "scale_rewards": ("none", {}, dict(multi_objective_aggregation="normalize_then_sum")),
    "importance_sampling_level": ("sequence", {}, dict(loss_type="vespo")),
    "cache_implementation": ("static", {}, dict(use_vllm=True)),
    "transformers_continuous_batching_config": ({"max_batch_tokens": 64},
                                                dict(use_transformers_continuous_batching=True)),
}  # fmt: skip
# Those that have an effect by themselves, or that TRL refuses or warns of; vLLM's are kept while it is off.
READ = {
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout",
    "cast_lm_head_to_fp32", "num_generations", "num_generations_eval", "max_completion_length",
    "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of",
    "generation_batch_size", "steps_per_generation", "temperature", "top_p", "top_k", "min_p",
    "generation_kwargs", "chat_template_kwargs", "repetition_penalty", "beta", "num_iterations",
    "reward_weights", "multi_objective_aggregation",
    "loss_type", "mask_truncated_completions", "sync_ref_model",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold",
    "log_completions", "log_multimodal", "log_completions_hub_repo", "use_transformers_continuous_batching",
    "use_transformers_paged",
    "max_tool_calling_iterations",
}  # fmt: skip


def test_every_field_of_trls_is_read_or_refused() -> None:
    theirs = {f.name for f in dataclasses.fields(GRPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    assert {n for n in theirs if "vllm" not in n} == READ | UNREAD.keys()


@pytest.mark.parametrize("name", UNREAD)
def test_a_field_of_trls_that_another_leaves_aside_is_refused_by_name(tmp_path, name) -> None:
    value, speaks, *silent = UNREAD[name]
    adopt(arguments(tmp_path, **speaks, **{name: value}), {})
    with pytest.raises(ValueError, match=f"^{name}=.* has no effect without .*leave {name} out"):
        adopt(arguments(tmp_path, **(silent[0] if silent else {}), **{name: value}), {})


def test_where_vllm_samples_its_ratios_belong_to_trls_loss(tmp_path) -> None:
    for name, value in (("correction", False), ("mode", "token_mask"), ("clip_max", 2.0), ("clip_min", 0.5)):
        given = {f"vllm_importance_sampling_{name}": value}
        adopt(arguments(tmp_path, use_vllm=True, **given), {})
        adopt(arguments(tmp_path, **given), dict(policy_loss="dppo"))  # kept while vLLM is off
        with pytest.raises(ValueError, match=f"sampling_{name}=.* has no effect without policy_loss='trl'"):
            adopt(arguments(tmp_path, use_vllm=True, **given), dict(policy_loss="dppo"))


def test_the_level_of_ratios_is_read_with_vespo_by_the_kls_correction_alone(tmp_path) -> None:
    vespo = dict(loss_type="vespo", importance_sampling_level="sequence")
    adopt(arguments(tmp_path, beta=0.1, **vespo), {})
    with pytest.raises(ValueError, match="importance_sampling_level='sequence' has no effect"):
        adopt(arguments(tmp_path, beta=0.1, use_bias_correction_kl=False, **vespo), {})


@pytest.mark.parametrize("hints, capped", [(False, False), (True, True)])
def test_a_cap_on_hints_is_read_where_there_are_hints(tmp_path, hints, capped) -> None:
    given = dict(hint_mode="gated", gate_cap=0.5, teacher="live", grad_norm_steps=0)
    trainer = lit(tmp_path, feedback_func=feedback if hints else None, **given)
    batch = trainer._collate([], trainer.pairs[:1])
    early = backward_first(trainer, {n: v.to(trainer.accelerator.device) for n, v in batch.items()}, 1.0)
    assert trainer._caps() is capped and (early is None) is capped


@pytest.mark.parametrize("loss, moves", [(0.5, True), (float("nan"), False), (float("inf"), False)])
def test_taids_time_stays_where_it_is_over_a_loss_that_is_no_number(tmp_path, loss, moves) -> None:
    trainer = lit(tmp_path, sdpo_wrapper="taid", taid_schedule="linear", teacher="live", grad_norm_steps=0)
    trainer.taid = TAIDScheduler(10, disable_adaptive=True)
    trainer.state.global_step = 4
    trainer._move_taid({"sdpo__tokens": 3.0, "sdpo__loss": 1.0})  # the first loss is remembered
    trainer.state.global_step, before = 9, trainer.taid.t
    trainer._move_taid({"sdpo__tokens": 3.0, "sdpo__loss": loss})
    assert (trainer.taid.t != before) is moves


def test_gradients_of_channels_are_not_measured_unless_asked_for(tmp_path) -> None:
    assert ComposerConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none").grad_norm_steps == 0


def test_cispo_takes_the_lower_clip_for_its_cap_where_there_is_no_upper_one(tmp_path) -> None:
    adopt(arguments(tmp_path, loss_type="cispo", epsilon=5.0), {})
    with pytest.raises(ValueError, match="epsilon=5.0 has no effect"):
        adopt(arguments(tmp_path, loss_type="cispo", epsilon=5.0, epsilon_high=4.0), {})


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(temperature=1.0, generation_kwargs={"temperature": 0.7}), "set temperature=0.7"),
        (dict(top_p=0.9, generation_kwargs={"top_p": 0.8}), "set top_p=0.8"),
    ],
)
def test_generation_kwargs_leave_no_field_without_effect(tmp_path, fields, says) -> None:
    with pytest.raises(ValueError, match=says):
        adopt(arguments(tmp_path, **fields), {})
    adopt(
        arguments(
            tmp_path, **fields | dict(generation_kwargs={n: fields[n] for n in fields["generation_kwargs"]})
        ),
        {},
    )
    adopt(arguments(tmp_path, generation_kwargs={"top_k": 10, "min_new_tokens": 2}), {})


def test_a_length_of_rollouts_is_refused_where_only_that_of_a_turn_is_read(tmp_path) -> None:
    short = dict(max_completion_length=6, generation_kwargs={"max_new_tokens": 3})
    args = adopt(arguments(tmp_path, loss_type="grpo", **short), {})
    with pytest.raises(
        ValueError, match="max_completion_length=6 has no effect .*set max_completion_length=3"
    ):
        refuse_without_calls(args, {})
    with pytest.raises(ValueError, match="max_completion_length=6 has no effect"):
        build(tmp_path, options=dict(loss_type="grpo", **short))
    for reads in (dict(tools=[len]), dict(environment_factory=dict), dict(rollout_func=print)):
        refuse_without_calls(args, reads)  # ends the rollout, not the turn
    refuse_without_calls(adopt(arguments(tmp_path, loss_type="dr_grpo", **short), {}), {})  # divides by it


def test_options_of_vllm_are_kept_while_it_is_off(tmp_path) -> None:
    assert adopt(arguments(tmp_path, vllm_server_port=9000), {}).vllm_server_port == 9000


@pytest.mark.parametrize("options", [dict(kl_coef=50.0), dict(policy_kind="gspo"), dict(epsilon_low=0.3)])
def test_the_policy_term_of_a_loss_config_is_refused_by_name(tmp_path, options) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))}.*channel 1 is TRL's own loss"):
        build(tmp_path, loss_config=LossConfig(**options))
    with pytest.raises(TypeError, match="channel 1 is TRL's own loss"):
        build(tmp_path, **options)


def test_a_preset_with_a_policy_term_is_refused_by_the_trainer_and_says_where_it_goes(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"channel 1 is TRL's own loss; set ComposerConfig\("):
        build(tmp_path, loss_config=LossConfig.preset("composer2"))


def test_a_composer_config_is_trls_own_and_more(tmp_path) -> None:
    args = adopt(arguments(tmp_path, max_steps=1), dict(alpha_sdpo=0.5, teacher="frozen"))
    trainer = build(
        tmp_path, args=True, options=dict(max_steps=1), feedback_func=feedback, preference_dataset=PAIRS
    )
    assert isinstance(trainer.args, ComposerConfig) and args.to_dict()["teacher"] == "frozen"
    assert type(arguments(tmp_path)) is not ComposerConfig
    saved = {f.name for f in dataclasses.fields(ComposerConfig)}
    assert saved >= {"alpha_sdpo", "beta_replay", "teacher", "taid_schedule"}
    assert test_trainer.TOKENIZER is trainer.processing_class


def test_schedules_begin_at_the_weight_and_end_at_zero() -> None:
    for kind in ("linear", "cosine"):
        values = [scheduled(0.4, kind, 0.5, p / 10) for p in range(11)]
        assert values[0] == 0.4 and values == sorted(values, reverse=True) and max(values[5:]) < 1e-12
    assert scheduled(0.4, "constant", 1.0, 1.0) == 0.4


@pytest.mark.parametrize(
    "options", [dict(grad_norm_steps=2), dict(gate_cap=0.5, hint_mode="gated", teacher="live")]
)
def test_gradients_of_channels_are_refused_under_reentrant_checkpointing(tmp_path, options) -> None:
    reentrant = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}={options[name]}.*'use_reentrant': False"):
        adopt(arguments(tmp_path, **reentrant), options)
    for harmless in ({"use_reentrant": False}, None):
        adopt(arguments(tmp_path, **reentrant | dict(gradient_checkpointing_kwargs=harmless)), options)
    adopt(arguments(tmp_path, **reentrant | dict(gradient_checkpointing=False)), options)
    adopt(arguments(tmp_path, **reentrant), {})


CHANNEL_OF = {"feedback_func": feedback, "preference_dataset": PAIRS}  # what each channel is fed with


@pytest.mark.parametrize(
    "option, fed_by",
    [
        (dict(sdpo_top_k=20), "feedback_func"), (dict(teacher="live"), "feedback_func"),
        (dict(alpha_schedule="linear"), "feedback_func"), (dict(dpo_variant="simpo"), "preference_dataset"),
        (dict(pairs_per_step=1), "preference_dataset"), (dict(beta_schedule="cosine"), "preference_dataset"),
        (dict(alpha_sdpo=0.5), "feedback_func"), (dict(beta_replay=0.5), "preference_dataset"),
    ],
)  # fmt: skip
def test_an_option_that_nothing_reads_is_named_when_the_trainer_is_built(tmp_path, option, fed_by) -> None:
    """Of a channel without weight, or with nothing to feed it; a channel that is on says nothing."""
    ((name, value),) = option.items()
    said = re.escape(f"{name}={value!r}") + f".*read by nothing in this run; it needs {fed_by}"
    fed = {fed_by: CHANNEL_OF[fed_by]}
    weight = "alpha_sdpo" if fed_by == "feedback_func" else "beta_replay"
    with pytest.warns(UserWarning, match=said):
        build(tmp_path, **option)
    if name != weight:
        with pytest.warns(UserWarning, match=said):
            build(tmp_path, **option, **fed, **{weight: 0.0})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        build(tmp_path, **option, **fed)
        build(tmp_path)
    assert not [w for w in heard if "read by nothing" in str(w.message)]


def test_what_only_some_of_a_channels_options_need_is_told_apart(tmp_path) -> None:
    """RLSD reads the teacher's options, none of the divergence's; norms need a channel, re-takes theirs."""
    rlsd = dict(alpha_sdpo=0.0, rlsd=0.5, teacher="live", sdpo_top_k=20, feedback_func=feedback)
    with pytest.warns(UserWarning, match=r"^sdpo_top_k=20: read by nothing.*alpha_sdpo above 0$"):
        build(tmp_path, **rlsd)
    with pytest.warns(UserWarning, match=r"^grad_norm_steps=2: read by nothing.*a channel that is on$"):
        build(tmp_path, grad_norm_steps=2)
    verified = dict(hint_mode="verified", teacher="live", retakes=4, alpha_sdpo=0.0)
    with pytest.warns(UserWarning, match=r"hint_mode='verified'.*retakes=4: read by nothing"):
        build(tmp_path, **verified)


@pytest.mark.parametrize(
    "options", [dict(alpha_sdpo=0.0, sdpo_temperature=2.0), dict(beta_replay=0.0, dpo_variant="simpo")]
)
def test_options_of_a_channel_without_weight_are_kept_and_read_by_nothing(
    everything, tmp_path, options
) -> None:
    weight, other = options
    assert getattr(adopt(arguments(tmp_path), options).loss_config(), other) == options[other]
    found = [loss_and_gradient(everything, **given) for given in ({weight: 0.0}, options)]
    assert torch.equal(*found)
    assert not torch.equal(
        loss_and_gradient(everything), loss_and_gradient(everything, **{other: options[other]})
    )


@pytest.mark.parametrize("value", [0.5, 2.5, 0, True])
def test_counts_are_whole(value):
    with pytest.raises(ValueError, match="sdpo_top_k=.*whole number"):
        LossConfig(sdpo_top_k=value)


def test_the_sampled_estimator_joins_eopds_reverse_kl():
    assert LossConfig(sdpo_wrapper="eopd", sdpo_sampled=True).sdpo_sampled
    with pytest.raises(ValueError, match="and not sdpo_token_clip"):
        LossConfig(sdpo_sampled=True, sdpo_jsd_beta=1.0, sdpo_token_clip=1.0)


@pytest.mark.parametrize("more, told", [({}, True), (dict(num_iterations=2), False)])
def test_an_importance_cap_that_nothing_reads_is_said(tmp_path, more, told):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        lit(tmp_path, sdpo_is_cap=2.0, options=more)
    assert any("sdpo_is_cap=2.0" in str(one.message) for one in seen) == told
