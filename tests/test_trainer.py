"""The trainer through its public door: equal to GRPOTrainer when off, lit when on, resumable, and loud when
dark.
"""

import contextlib
import inspect
import json
import logging
import math
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from composer_nb.batch import DPOPair
from composer_nb.credit import rlsd_mix
from composer_nb.forward.shared_body import SharedCalls
from composer_nb.hints import encode, render
from composer_nb.loss import LossConfig
from composer_nb.self_teacher import SelfTeacher
from composer_nb.trainer import ComposerReplicationTrainer, Feedback, last_checkpoint, moved_seams
from composer_nb.training import seams as room
from composer_nb.training import trainer as trainer_module
from composer_nb.training.config import adopt
from composer_nb.training.presets import with_length_penalty
from composer_nb.training.report import SeriesWatch
from composer_nb.training.shards import refuse_shards
from composer_nb.training.sharing import TILE, PrefixSharingTrainer, lean_head

logging.getLogger("transformers").setLevel(logging.ERROR)
TOKENIZER = tiny.tokenizer()
PROMPTS = [
    [{"role": "user", "content": f"Say {word}."}]
    for word in ("red", "green, please", "blue", "a long phrase about black")
]
PAIRS = [DPOPair(str(i), p, chosen="yes", rejected="no, never") for i, p in enumerate(PROMPTS)]


def reward(completions, **columns):
    """Something that varies within a group."""
    return [(len(c[-1]["content"]) % 7) / 7 for c in completions]


def feedback(completions, **columns):
    return ["Reminder: say the colour." if i % 2 else None for i, _ in enumerate(completions)]


def arguments(folder, **options):
    defaults = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=6, max_steps=3,
                    learning_rate=1e-2, logging_steps=1, bf16=False, use_cpu=True, report_to="none",
                    disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, seed=0)  # fmt: skip
    return GRPOConfig(str(folder), **(defaults | options))


def build(folder, cls=ComposerReplicationTrainer, model=None, options=None, args=False, **kwargs):
    dataset = Dataset.from_list([{"prompt": p, "colour": i} for i, p in enumerate(PROMPTS * 4)])
    plain = arguments(folder, **(options or {}))
    trainer = cls(
        model or tiny.model(),
        reward,
        adopt(plain, {}) if args else plain,
        dataset,
        processing_class=TOKENIZER,
        **kwargs,
    )
    return trainer


# An untrained model hardly reads its hint: this makes channel 2's gradient as large as the others'.
ALPHA = 2000.0


def lit(folder, **kwargs):
    defaults = dict(
        alpha_sdpo=ALPHA,
        beta_replay=0.2,
        feedback_func=feedback,
        preference_dataset=PAIRS,
        pairs_per_step=2,
        grad_norm_steps=1,
    )
    return build(folder, **(defaults | kwargs))


def record(trainer):
    """Losses, gradients before each optimizer step, and final weights of a training run."""
    gradients, losses = [], []
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def remember(*args, **kwargs):
        gradients.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])
        return step(*args, **kwargs)

    trainer.optimizer.step = remember
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, gradients, [p.detach().clone() for p in trainer.model.parameters()]


def log(trainer):
    return [row for row in trainer.state.log_history if "step_time" in row]


def test_the_seams_hold():
    assert moved_seams() == []


@pytest.mark.parametrize("name", room.TRL_SEAMS)
def test_a_moved_seam_is_named(name):
    changed = type("Changed", (GRPOTrainer,), {name: lambda self, something_else: None})
    assert len(moved_seams(changed)) == 1 and moved_seams(changed)[0].startswith(name)


def test_a_moved_seam_stops_construction(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, something_else: None)
    room.require_seams.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="_prepare_inputs: expected .*install trl"):
            build(tmp_path)
    finally:
        room.require_seams.cache_clear()


@pytest.mark.parametrize("name", room.TRL_ATTRIBUTES)
def test_a_vanished_attribute_is_named(name, monkeypatch):
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda obj: real(obj).replace(f"self.{name}", "self.renamed"))
    assert any(line.startswith(name) for line in moved_seams())


def test_a_flipped_scaling_rule_is_named():
    assert (
        "loss_is_scaled_for_ga"
        in moved_seams(type("Changed", (GRPOTrainer,), {"loss_is_scaled_for_ga": False}))[0]
    )


@pytest.mark.parametrize("name", ["compact = _use_triton(", "_CHUNKED_LOGPROB_CHUNK_SIZE"])
def test_a_head_that_chooses_its_positions_elsewhere_is_named(name, monkeypatch):
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda obj: real(obj).replace(name, "renamed"))
    assert any("add_fused_lm_head" in line for line in moved_seams())


def test_a_lean_head_scores_the_same_from_fewer_positions(monkeypatch):
    model, rows, real = tiny.model(), [], trl_utils._ChunkedLogProbFunction.apply
    trl_utils.add_fused_lm_head(model)

    def watched(hidden, weight, bias, labels, temperature, chunk, *others):
        rows.append((len(hidden), chunk))
        return real(hidden, weight, bias, labels, temperature, chunk, *others)

    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "apply", watched)
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(9) < 6, -100)

    def scored(within):
        with within:
            found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        return found, torch.autograd.grad(found.sum(), list(model.parameters()))

    plain, lean = scored(contextlib.nullcontext()), scored(lean_head(torch.device("cpu")))
    with lean_head(torch.device("meta")):
        assert not trl_utils._use_triton(torch.device("cpu"))
    assert rows == [(16, 32768), (6, TILE)] and trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32768
    torch.testing.assert_close(lean[0], plain[0])
    torch.testing.assert_close(lean[1], plain[1], rtol=2e-5, atol=2e-5)  # fp32, summed in another order


@pytest.mark.parametrize("accumulation", [1, 2])
def test_off_is_grpo_bit_for_bit_over_three_steps(tmp_path, accumulation):
    options = dict(gradient_accumulation_steps=accumulation)
    plain = record(build(tmp_path / "a", GRPOTrainer, options=options))
    off = record(lit(tmp_path / "b", alpha_sdpo=0.0, beta_replay=0.0, share_prefixes=False, options=options))
    assert plain[0] == off[0] and len(plain[1]) == len(off[1]) == 3
    assert all(
        torch.equal(a, b) for x, y in zip(plain[1], off[1], strict=True) for a, b in zip(x, y, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[2], off[2], strict=True))


AGAIN = dict(num_iterations=2)  # the second step meets the rollouts of the first: ratios are not 1


@contextlib.contextmanager
def counted_positions(monkeypatch):
    """Positions that calls under sharing ran, and those of plain passes; 0 where nothing shared."""
    found = {"shared": 0, "plain": 0}

    def add(calls, positions, plain):
        found["shared"], found["plain"] = found["shared"] + positions, found["plain"] + plain

    with monkeypatch.context() as patch:
        patch.setattr(SharedCalls, "add", add)
        yield found


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(gradient_accumulation_steps=2), dict(gradient_accumulation_steps=2, loss_type="bnpo"),
        AGAIN, dict(steps_per_generation=2), dict(beta=0.1), dict(entropy_coef=0.05),
        dict(top_entropy_quantile=0.5), dict(use_adaptive_entropy=True, entropy_coef=0.05),
        AGAIN | dict(importance_sampling_level="sequence"), AGAIN | dict(loss_type="grpo", delta=2.0),
        dict(loss_type="dr_grpo"), AGAIN | dict(loss_type="cispo"), AGAIN | dict(loss_type="sapo"),
        AGAIN | dict(loss_type="vespo"), AGAIN | dict(loss_type="luspo"),
        AGAIN | dict(off_policy_mask_threshold=0.01), dict(scale_rewards="batch"), dict(temperature=0.7),
    ],
    ids=str,
)  # fmt: skip
def test_sharing_prefixes_changes_no_gradient_beyond_rounding(tmp_path, monkeypatch, options):
    """All three channels lit, two steps, beside TRL's own options. A step by SGD: that of Adam is as large
    where a gradient is rounding alone. The KL's reference is the model without its adapters.
    """
    usual = dict(num_generations=4, max_steps=2, max_grad_norm=0.0, learning_rate=1e-4, optim="sgd")
    options = usual | options
    adapters = {"peft_config": LoraConfig(init_lora_weights=False, target_modules="all-linear")}
    found = []
    for share in (False, True):
        torch.manual_seed(0)
        own = dict(options=options, grad_norm_steps=0, teacher="live", share_prefixes=share)
        trainer = lit(tmp_path / str(share), **own, **(adapters if "beta" in options else {}))
        with counted_positions(monkeypatch) as ran:
            steps = record(trainer)[1]
        assert trainer._told == frozenset() and log(trainer)[-1]["sdpo/tokens"] > 0
        assert (0 < ran["shared"] < ran["plain"]) is share
        found.append([torch.cat([g.flatten() for g in step]) for step in steps])
    assert len(found[0]) == len(found[1]) == 2
    for plain, shared in zip(*found, strict=True):
        assert (plain - shared).norm() < 1e-4 * plain.norm()
        assert plain.norm() > 0


@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_mixed_precision_shares_prefixes_whether_or_not_a_channel_is_lit(tmp_path, alpha):
    options = dict(bf16=True, max_steps=1)
    trainer = build(tmp_path, options=options, alpha_sdpo=alpha, feedback_func=feedback if alpha else None)
    trainer.train()
    assert trainer._told == frozenset()


def test_channels_off_with_sharing_is_sharing_alone_bit_for_bit(tmp_path):
    off = record(lit(tmp_path / "a", alpha_sdpo=0.0, beta_replay=0.0))
    bare = record(build(tmp_path / "b", PrefixSharingTrainer, args=True))
    assert all(torch.equal(a, b) for a, b in zip(off[2], bare[2], strict=True))


def test_missing_inputs_are_also_off_bit_for_bit(tmp_path):
    plain = record(build(tmp_path / "a", GRPOTrainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off = record(build(tmp_path / "b", alpha_sdpo=0.5, beta_replay=0.5, share_prefixes=False))
    assert all(torch.equal(a, b) for a, b in zip(plain[2], off[2], strict=True))


@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
def test_lit_channels_log_losses_counts_and_gradients(tmp_path, teacher):
    trainer = lit(tmp_path, teacher=teacher, lift_steps=1)
    trainer.train()
    for row in log(trainer):
        assert row["sdpo/loss"] > 0 and row["sdpo/tokens"] > 0 and row["sdpo/weight"] == ALPHA
        assert row["sdpo/grad_norm"] > 0 and row["replay/grad_norm"] > 0 and row["replay/pairs"] == 2
        assert row["sdpo/hinted_fraction"] == 0.5
        assert row["policy/active"] == 0 or row["policy/grad_norm"] > 0
        assert "entropy" in row and "completions/mean_length" in row and "sdpo/lift" in row
    assert abs(log(trainer)[0]["replay/margin"]) < 1e-4  # the references are the untrained model's own


def test_measuring_the_lift_does_not_change_training(tmp_path):
    with_lift, without = record(lit(tmp_path / "a", lift_steps=1)), record(lit(tmp_path / "b"))
    assert all(torch.equal(a, b) for a, b in zip(with_lift[2], without[2], strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_measured_step_has_the_gradient_of_an_unmeasured_one(tmp_path, accumulation):
    options = dict(max_steps=1, max_grad_norm=0.0, gradient_accumulation_steps=accumulation)
    found = [
        torch.cat(
            [g.flatten() for g in record(lit(tmp_path / str(n), grad_norm_steps=n, options=options))[1][0]]
        )
        for n in (1, 0)
    ]
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-5


def test_logged_norms_are_those_of_the_whole_step_and_counts_its_sum(tmp_path):
    rows = []
    for size, accumulation in ((4, 1), (1, 4)):
        options = dict(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            loss_type="dapo",
        )
        torch.manual_seed(0)
        trainer = lit(tmp_path / str(size), options=options, pairs_per_step=4)
        trainer.train()
        rows.append(log(trainer)[0])
    for name in ("sdpo/tokens", "replay/pairs"):
        assert rows[0][name] == rows[1][name]
    for name in (
        "policy/grad_norm",
        "sdpo/grad_norm",
        "replay/grad_norm",
        "sdpo/loss",
        "replay/loss",
        "replay/accuracy",
    ):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-6)


def test_a_configuration_object_is_taken_as_it_is(tmp_path):
    config = LossConfig(alpha_sdpo=0.7, sdpo_jsd_beta=0.0)
    trainer = build(tmp_path / "a", loss_config=config, feedback_func=feedback)
    assert trainer.loss_config == config
    assert build(tmp_path / "b", loss_config=config, beta_replay=0.3).loss_config.beta_replay == 0.3
    assert build(tmp_path / "c").loss_config == LossConfig.preset("seed")


def test_policy_options_belong_to_trl(tmp_path):
    with pytest.raises(TypeError, match="GRPOConfig\\(loss_type"):
        build(tmp_path, policy_kind="dapo")


def test_windows_that_straddle_generations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps_per_generation=3"):
        lit(tmp_path, options=dict(steps_per_generation=3, gradient_accumulation_steps=2))


def test_several_steps_per_generation_count_their_own_windows(tmp_path):
    trainer = lit(
        tmp_path,
        options=dict(
            per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=2
        ),
    )
    trainer.train()
    counted = [batch["sdpo_count"].item() for batch in trainer._buffered_inputs]
    masks = [batch["sdpo_loss_mask"].sum().item() for batch in trainer._buffered_inputs]
    assert counted == [masks[0] + masks[1]] * 2 + [masks[2] + masks[3]] * 2
    assert [row["sdpo/tokens"] for row in log(trainer)] == [counted[0], counted[2]]


def test_evaluation_is_grpo_alone(tmp_path):
    """With the same weights and draws, a trainer whose channels are on has the numbers of plain GRPO."""
    dataset, found = Dataset.from_list([{"prompt": p, "colour": 0} for p in PROMPTS]), []
    for channels in ({}, dict(alpha_sdpo=0.0, beta_replay=0.0, grad_norm_steps=0)):
        given = dict(feedback_func=None, preference_dataset=None) if channels else {}
        trainer = lit(tmp_path / str(len(found)), **channels, **given)
        torch.manual_seed(0)
        found.append(trainer.evaluate(dataset))
    timed = {name for name in found[0] if name.endswith(("time", "per_second"))}
    lit_up, plain = ({k: v for k, v in one.items() if k not in timed} for one in found)
    assert lit_up == plain and {"eval_loss", "eval_reward"} <= lit_up.keys()


def test_one_student_forward_under_bf16(tmp_path):
    """The head shortcut holds under autocast too, so that channel 2 costs no second pass of the student."""
    trainer = lit(tmp_path, beta_replay=0.0, teacher="frozen", options=dict(bf16=True, max_steps=1))
    calls = []
    original = trainer._compute_loss

    def counted(model, inputs):
        hook = trainer.model.base_model.register_forward_hook(lambda *_: calls.append(1))
        try:
            return original(model, inputs)
        finally:
            hook.remove()

    trainer._compute_loss = counted
    trainer.train()
    assert calls == [1] and log(trainer)[0]["sdpo/loss"] > 0


class Casts(TorchDispatchMode):
    """How often each of these weights is cast while the named method runs."""

    def __init__(self, trainer, method, model=None):
        super().__init__()
        weights = (model or trainer.model).named_parameters()
        self.names = {p.data_ptr(): n for n, p in weights if p.dim() == 2}
        self.counts, original = Counter(), getattr(trainer, method)

        def watched(*args, **kwargs):
            with self:
                return original(*args, **kwargs)

        setattr(trainer, method, watched)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            if name := self.names.get(args[0].data_ptr()):
                self.counts[name] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("share", [True, False])
def test_bf16_casts_each_weight_once_while_sampling(tmp_path, share, adapters):
    """Not once per token; the base under adapters is frozen, and autocast keeps no casts of such weights."""
    lora = dict(peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if adapters else {}
    trainer = lit(tmp_path, beta_replay=0.0, share_prefixes=share, lift_steps=1, grad_norm_steps=0,
                  options=dict(bf16=True, max_steps=1), **lora)  # fmt: skip
    wanted = [p.requires_grad for p in trainer.model.parameters()]
    sampling, lift = Casts(trainer, "_generate_single_turn"), Casts(trainer, "_measure_lift")
    trainer.train()
    assert len(sampling.counts) > 10 and set(sampling.counts.values()) == {1}
    assert len(lift.counts) > 10 and set(lift.counts.values()) <= {1, 2}  # as teacher, as student
    assert [p.requires_grad for p in trainer.model.parameters()] == wanted


def test_a_frozen_teachers_copy_is_cast_once_while_its_lift_is_measured(tmp_path):
    trainer = lit(tmp_path, beta_replay=0.0, teacher="frozen", lift_steps=1, grad_norm_steps=0,
                  options=dict(bf16=True, max_steps=1))  # fmt: skip
    copy = trainer.teacher.kept.copy
    lift = Casts(trainer, "_measure_lift", copy)
    trainer.train()
    assert len(lift.counts) > 10 and set(lift.counts.values()) == {1}
    assert not any(p.requires_grad for p in copy.parameters())


def test_a_hint_without_lift_is_reported(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = lit(tmp_path, lift_steps=1, options=dict(max_steps=4))
        trainer._fresh_reward = lambda rows, answers: torch.full((len(rows),), 0.5)
        trainer.train()
    assert sum("mean lift" in str(w.message) for w in caught) == 1
    with pytest.raises(ValueError, match="lift_steps"):
        lit(tmp_path / "b", lift_steps=1, rollout_func=two_turns)


def test_channel_gradients_add_up_to_the_step(tmp_path):
    """Total = policy + alpha sdpo + beta replay, checked on the very gradients of one step."""
    parts = {}
    for name, weights in {
        "all": (ALPHA, 0.2),
        "sdpo": (ALPHA, 0.0),
        "replay": (0.0, 0.2),
        "policy": (0.0, 0.0),
    }.items():
        options = dict(max_steps=1, max_grad_norm=0.0)
        trainer = lit(tmp_path / name, alpha_sdpo=weights[0], beta_replay=weights[1], options=options)
        parts[name] = torch.cat([g.flatten() for g in record(trainer)[1][0]])
    expected = parts["sdpo"] + parts["replay"] - parts["policy"]
    assert (parts["all"] - expected).norm() / expected.norm() < 1e-4


def test_accumulation_gives_the_gradient_of_the_whole_step(tmp_path):
    """One batch of four against four micro-batches of one: same rollouts, same counts, same channel-2 and 3
    gradients.
    """
    found = []
    for size, accumulation in ((4, 1), (1, 4)):
        options = dict(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0.0,
            loss_type="dapo",
        )
        torch.manual_seed(0)
        trainer = lit(tmp_path / str(size), options=options, pairs_per_step=4)
        found.append(torch.cat([g.flatten() for g in record(trainer)[1][0]]))
    assert (found[0] - found[1]).norm() / found[0].norm() < 1e-4


def test_a_dark_channel_warns_once_with_the_reason(tmp_path):
    cases = [
        (dict(alpha_sdpo=1.0, beta_replay=0.0), "no feedback_func"),
        (
            dict(
                alpha_sdpo=1.0,
                beta_replay=0.0,
                feedback_func=lambda completions, **_: [None] * len(completions),
            ),
            "no hint",
        ),
        (dict(alpha_sdpo=0.0, beta_replay=1.0), "no preference_dataset"),
    ]
    for number, (options, reason) in enumerate(cases):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(tmp_path / str(number), dark_steps=1, **options).train()
        dark = [str(w.message) for w in caught if "was dark" in str(w.message)]
        assert len(dark) == 1 and reason in dark[0]


def test_feedback_may_name_an_earlier_turn_and_must_fit(tmp_path):
    site = lit(
        tmp_path / "a",
        feedback_func=lambda completions, **_: [Feedback("Say it.", site=0)] * len(completions),
    )
    site.train()
    assert log(site)[0]["sdpo/hinted_fraction"] == 1
    with pytest.raises(ValueError, match="3 answers for 4"):
        lit(tmp_path / "b", feedback_func=lambda completions, **_: ["x"] * 3).train()


def two_turns(prompts, trainer):
    """A rollout of two sampled turns with the environment's words in between."""
    between = encode(TOKENIZER, "\n<|im_start|>user\nWrong, again.<|im_end|>\n<|im_start|>assistant\n")
    turn = encode(TOKENIZER, "blue or red<|im_end|>")
    completion, mask = turn + between + turn, [1] * len(turn) + [0] * len(between) + [1] * len(turn)
    return {
        "prompt_ids": [encode(TOKENIZER, render(TOKENIZER, p)) for p in prompts],
        "completion_ids": [completion for _ in prompts],
        "logprobs": [[0.0] * len(completion) for _ in prompts],
        "env_mask": [mask for _ in prompts],
    }


def scripted(prompts, trainer):
    """What is said depends on the prompt alone, so that any number of processes samples the same rollouts."""
    ids = [encode(TOKENIZER, p[-1]["content"] + " red" * (number % 2)) for number, p in enumerate(prompts)]
    prompt_ids = [encode(TOKENIZER, render(TOKENIZER, p)) for p in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[0.0] * len(i) for i in ids]}


def scripted_turns(prompts, trainer):
    """The same as two turns with a token between them that was not sampled, and what came from
    each turn on.
    """
    rows = scripted(prompts, trainer)
    rows["env_mask"] = [[int(i != 1) for i in range(len(ids))] for ids in rows["completion_ids"]]
    rows["turn_returns"] = [[float(number % 2), 0.25] for number in range(len(prompts))]
    return rows


def feedback_by_prompt(prompts, completions, **columns):
    """A hint for some prompts only, so that processes score different numbers of tokens."""
    return [
        "Reminder: say the colour." if "phrase" in p[-1]["content"] or "red" in p[-1]["content"] else None
        for p in prompts
    ]


@pytest.mark.parametrize("site", [0, 1, -1])
def test_several_turns_hint_goes_above_the_named_one(tmp_path, site):
    hint = "Reminder: one colour."
    trainer = lit(tmp_path, rollout_func=two_turns,
                  feedback_func=lambda completions, **_: [Feedback(hint, site=site)] * len(completions),
                  options=dict(max_completion_length=64, max_steps=1))  # fmt: skip
    seen, original = [], trainer._hint_fields
    trainer._hint_fields = lambda output: seen.append((output, original(output))) or seen[-1][1]
    trainer.train()
    output, fields = seen[0]
    turn = len(encode(TOKENIZER, "blue or red<|im_end|>"))
    assert fields["sdpo_loss_mask"].sum(1).tolist() == [turn] * 4
    first = fields["student_response_idx"][0, 0].item() - output["prompt_ids"].shape[1]
    assert (first == 0) is (site == 0)
    read = TOKENIZER.decode(
        fields["ctx_teacher_input_ids"][0][fields["ctx_teacher_attention_mask"][0].bool()]
    )
    above = read.index(hint)
    assert read.count(hint) == 1 and read[above:].count("blue or red") == 1
    assert read[:above].count("blue or red") == (0 if site == 0 else 1)


def test_prompts_as_plain_text_are_refused_for_hints(tmp_path):
    dataset = Dataset.from_list([{"prompt": "Say red."}] * 8)
    with pytest.raises(ValueError, match="conversational prompts"):
        ComposerReplicationTrainer(tiny.model(), lambda completions, **_: [0.0] * len(completions),
                                   arguments(tmp_path), dataset, processing_class=TOKENIZER, alpha_sdpo=1.0,
                                   beta_replay=0.0, feedback_func=lambda **_: ["x"] * 4)  # fmt: skip


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(alpha_sdpo=-1.0), "alpha_sdpo=-1.0"),
        (dict(beta_replay=float("nan")), "beta_replay=nan"),
        (dict(teacher="dead"), "teacher='dead'"),
        (dict(teacher_ema_rate=0.0), "teacher_ema_rate"),
        # fmt: skip
        (dict(preference_dataset=[{"chosen": "x"}]), "lacks"),
    ],
)
def test_wrong_options_are_named_before_training(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        lit(tmp_path, **options)


def test_retired_names_say_what_replaced_them(tmp_path):
    with pytest.raises(TypeError, match="taid_t"):
        lit(tmp_path, taid_schedule_step=3)


def test_teachers():
    for kind, expected in (("live", 1.0), ("frozen", 0.0), ("ema", 0.25)):
        student = tiny.model(vocab_size=64)
        teacher = SelfTeacher(student, kind, rate=0.25)
        before = student.model.norm.weight.detach().clone()
        with torch.no_grad():
            student.model.norm.weight += 1.0
        teacher.update()
        with teacher.use() as module:
            moved = (module.model.norm.weight - before).mean().item()
        assert moved == pytest.approx(expected)


def test_with_adapters_the_frozen_teacher_is_the_base_and_costs_no_copy():
    import peft

    base = tiny.model(vocab_size=64)
    student = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    ids = torch.arange(3, 9).unsqueeze(0)
    teacher = SelfTeacher(student, "frozen")
    assert teacher.copy is None
    with torch.no_grad(), teacher.use() as module:
        frozen = module(input_ids=ids).logits
    assert torch.allclose(frozen, tiny.model(vocab_size=64)(input_ids=ids).logits, atol=1e-6)
    assert not torch.allclose(student(input_ids=ids).logits, frozen)


class Killed(Exception):
    pass


@pytest.mark.parametrize("teacher", ["live", "frozen", "ema", "trust_region"])
def test_a_killed_run_resumes_to_the_same_result(tmp_path, teacher):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)
    unbroken = lit(tmp_path / "whole", teacher=teacher, options=options)
    unbroken.train()

    killed = lit(tmp_path / "broken", teacher=teacher, options=options)
    original = killed._compute_loss

    def die(model, inputs):
        if killed.state.global_step == 3:
            raise Killed
        return original(model, inputs)

    killed._compute_loss = die
    with pytest.raises(Killed):
        killed.train()
    (tmp_path / "broken" / "checkpoint-3").mkdir()  # a checkpoint whose writing was cut off
    newest = last_checkpoint(tmp_path / "broken")
    assert newest.endswith("checkpoint-2")

    resumed = lit(tmp_path / "broken", teacher=teacher, options=options)
    resumed.train(resume_from_checkpoint=newest)
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    if teacher == "ema":
        for a, b in zip(unbroken.teacher.copy.parameters(), resumed.teacher.copy.parameters(), strict=True):
            assert torch.equal(a, b)
    last, same = log(unbroken)[-1], log(resumed)[-1]
    for name in ("loss", "reward", "sdpo/loss", "replay/loss"):
        assert last[name] == same[name]


def test_resuming_with_another_teacher_or_base_is_refused(tmp_path):
    options = dict(max_steps=1, save_strategy="steps", save_steps=1)
    lit(tmp_path, teacher="frozen", options=options).train()
    checkpoint = last_checkpoint(tmp_path)
    assert json.loads((tmp_path / "checkpoint-1" / "composer_state.json").read_text())["teacher"] == "frozen"
    with pytest.raises(ValueError, match="pass the same"):
        lit(tmp_path, teacher="ema", options=options).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="same initial weights"):
        lit(tmp_path, teacher="frozen", model=tiny.model(seed=5), options=options).train(
            resume_from_checkpoint=checkpoint
        )


def test_no_checkpoint_is_none(tmp_path):
    assert last_checkpoint(tmp_path) is None


def test_a_trust_region_teacher_trains_and_refuses_lift(tmp_path):
    trainer = lit(tmp_path, teacher="trust_region", teacher_ema_rate=0.25, options=dict(max_steps=2))
    trainer.train()
    assert all(row["sdpo/grad_norm"] > 0 for row in log(trainer))
    with pytest.raises(ValueError, match="set lift_steps=0"):
        lit(tmp_path, teacher="trust_region", lift_steps=1)


@pytest.mark.parametrize("teacher", ["frozen", "ema", "trust_region"])
def test_adapters_train_under_every_teacher_and_resume(tmp_path, teacher):
    import peft

    def adapted():
        return peft.get_peft_model(tiny.model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    options = dict(max_steps=3, save_strategy="steps", save_steps=2)
    whole = lit(tmp_path, model=adapted(), teacher=teacher, options=options)
    whole.train()
    assert whole.teacher.copy is None and all(row["sdpo/grad_norm"] > 0 for row in log(whole))
    resumed = lit(tmp_path, model=adapted(), teacher=teacher, options=options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, a), (_, b) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_diagnostics_are_logged_by_default(tmp_path):
    trainer = lit(tmp_path)
    trainer.train()
    for row in log(trainer):
        assert {"policy/hesitation_rate", "sdpo/hint_leak_rate", "sdpo/scored_share"} <= set(row)
        assert 0 < row["sdpo/scored_share"] <= 1
        if row["policy/grad_norm"] > 0:
            assert all(
                -1 <= row[f"{name}/cosine"] <= 1 and row[f"{name}/cosine"] != 0 for name in ("sdpo", "replay")
            )


def test_a_series_that_collapses_warns_once(tmp_path):
    trainer = lit(tmp_path, options=dict(max_steps=1))
    trainer.report.watch.history["hint_leak_rate"] = [0.5] * 10
    with pytest.warns(UserWarning, match="hint_leak_rate is 0.") as caught:
        trainer.train()
    assert sum("hint_leak_rate" in str(w.message) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.report.watch.look(trainer._metrics["train"])


def test_rlsd_sizes_advantages_by_the_teacher_on_hinted_turns_only(tmp_path, monkeypatch):
    seen, original = [], trainer_module.credited_advantages

    def watched(trainer, inputs):
        seen.append((inputs, original(trainer, inputs)))
        return seen[-1][1]

    monkeypatch.setattr(trainer_module, "credited_advantages", watched)
    trainer = lit(
        tmp_path,
        alpha_sdpo=0.0,
        beta_replay=0.0,
        rlsd=0.5,
        rlsd_steps=2,
        teacher="frozen",
        # fmt: skip
        model=tiny.model(seed=1),
        options=dict(max_steps=3, learning_rate=0.0, temperature=0.7),
    )
    trainer.train()
    for step, (inputs, credited) in enumerate(seen):
        plain, width = inputs["advantages"].unsqueeze(1), inputs["prompt_ids"].shape[1]
        compared, rows = inputs["sdpo_loss_mask"], inputs["ctx_teacher_attention_mask"].bool()
        columns = (inputs["student_response_idx"] - width)[compared]
        at = dict(
            zip(
                zip(compared.nonzero()[:, 0].tolist(), columns.tolist()),
                inputs["teacher_response_idx"][compared].tolist(),
            )
        )
        mask = torch.zeros_like(inputs["completion_ids"], dtype=torch.bool)
        mask[compared.nonzero()[:, 0], columns] = True
        if step == 2:  # faded out
            assert credited is inputs["advantages"]
            continue
        assert torch.equal(credited[~mask], plain.expand_as(credited)[~mask].float())
        for row, column in mask.nonzero().tolist():
            ids = torch.cat(
                [inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()], inputs["completion_ids"][row]]
            )
            prompt = int(inputs["prompt_mask"][row].sum())
            hinted, place = inputs["ctx_teacher_input_ids"][row][rows[row]], at[row, column]
            token = inputs["completion_ids"][row, column]
            assert hinted[place] == token
            with torch.no_grad():
                old, new = (
                    (trainer.model(input_ids=x[None]).logits[0, i - 1] / 0.7).log_softmax(-1)[token]
                    for x, i in ((ids, prompt + column), (hinted, place))
                )
            mix = rlsd_mix(step, start=0.5, decay_steps=2)
            push = (plain[row, 0].sign() * (new - old)).exp().clamp(0.8, 1.2)
            assert credited[row, column] == pytest.approx(
                plain[row, 0].item() * ((1 - mix) + mix * push.item()), abs=1e-4
            )
    assert len(seen) == 3 and any((a["advantages"] != 0).any() for a, _ in seen[:2])


@pytest.mark.parametrize(
    "options", [dict(rlsd=2.0), dict(rlsd=0.5, rlsd_steps=0), dict(rlsd=0.5, feedback_func=None)]
)
def test_rlsd_without_sense_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="rlsd"):
        lit(tmp_path, **options)


def test_gradient_checkpointing_gives_the_same_step(tmp_path):
    runs = [
        record(
            lit(
                tmp_path / str(on),
                model=tiny.model(seed=2),
                options=dict(gradient_checkpointing=on, max_steps=1),
            )
        )
        for on in (False, True)
    ]
    for a, b in zip(runs[0][1][0], runs[1][1][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        dict(beta_replay=0.0, rollout_func=scripted),
        dict(dpo_variant="simpo", rollout_func=scripted),
        dict(rollout_func=scripted),
        dict(rollout_func=scripted, share_prefixes=False),
        dict(beta_replay=0.0),
    ],
    ids=["no-pairs", "simpo", "warm-cache", "warm-cache-unshared", "sampled"],
)
def test_the_first_pass_under_checkpointing_keeps_the_students_states_alone(tmp_path, settings):
    """TRL's default, on a model that no pass has looked at before: the check of its cache is not
    the student's pass.
    """
    own = dict(model=tiny.model(seed=2), grad_norm_steps=0) | settings
    plain = record(lit(tmp_path, options=dict(max_steps=1), **own))[1][0]  # fills the cache of references
    own["model"] = tiny.model(seed=2)
    found = record(lit(tmp_path, options=dict(max_steps=1, gradient_checkpointing=True), **own))[1][0]
    for a, b in zip(plain, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, settings, close",
    [
        (torch.float64, {}, 1e-12),
        (torch.float64, dict(gradient_accumulation_steps=2), 1e-12),
        (torch.float64, dict(gradient_checkpointing=True), 1e-12),
        (torch.float32, dict(bf16=True), 1e-2),
        (torch.float32, dict(bf16=True, gradient_accumulation_steps=2), 1e-2),
    ],
)
def test_pairs_before_the_policys_pass_leave_the_same_gradient(tmp_path, monkeypatch, dtype, settings, close):
    found = {}
    for name in ("first", "together"):
        if name == "together":
            monkeypatch.setattr(trainer_module, "backward_first", lambda *_: None)
        options = dict(max_steps=2, learning_rate=0.0) | settings
        trainer = lit(
            tmp_path / name, model=tiny.model().to(dtype), options=options, grad_norm_steps=0, teacher="live"
        )
        found[name] = record(trainer)[:2], log(trainer)
    (losses, gradients), logged = found["first"]
    (other_losses, others), other_log = found["together"]
    assert len(gradients) == 2 and losses == pytest.approx(other_losses, rel=max(close, 1e-6))
    for mine, theirs in zip(gradients, others):
        mine, theirs = (torch.cat([g.flatten().double() for g in side]) for side in (mine, theirs))
        assert (mine - theirs).norm() <= close * theirs.norm() > 0
    for row, other in zip(logged, other_log):
        names = (
            "replay/loss",
            "replay/margin",
            "replay/accuracy",
            "replay/pairs",
            "replay/weight",
            "sdpo/loss",
        )
        assert [row[n] for n in names] == pytest.approx([other[n] for n in names], rel=max(close, 1e-6))


@pytest.mark.parametrize(
    "options", [dict(grad_norm_steps=1), dict(gate_cap=0.5, hint_mode="gated", teacher="live")]
)
def test_channels_that_are_measured_go_through_one_backward_pass(tmp_path, monkeypatch, options):
    given, inner = [], trainer_module.backward_first
    monkeypatch.setattr(trainer_module, "backward_first", lambda *a: given.append(inner(*a)) or given[-1])
    for name, more, alone in (("one", options, False), ("two", dict(grad_norm_steps=0), True)):
        given.clear()
        lit(tmp_path / name, **dict(grad_norm_steps=0) | more, options=dict(max_steps=1)).train()
        assert len(given) == 1 and (given[0] is not None) == alone


@pytest.mark.parametrize("every, times", [(1, 1), (2, 0), (0, 0)])
def test_norms_in_every_step_are_said_once_with_their_price(tmp_path, every, times):
    trainer = lit(tmp_path, grad_norm_steps=every, options=dict(max_steps=2, gradient_accumulation_steps=2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(w.message) for w in told if str(w.message).startswith("grad_norm_steps=1")]
    assert len(said) == times and all("set grad_norm_steps=20" in sentence for sentence in said)


def test_means_over_sequences_count_sequences(tmp_path):
    trainer = lit(
        tmp_path,
        sdpo_reduction="seq-mean-token-mean",
        options=dict(max_steps=1, gradient_accumulation_steps=2),
    )
    counts, reported = [], trainer._reported
    trainer._reported = lambda parts, inputs: (
        counts.append((inputs["sdpo_count"].item(), parts.scored["sdpo"])) or reported(parts, inputs)
    )
    trainer.train()
    assert counts[0][0] == sum(rows for _, rows in counts) == 4


def test_reference_scores_are_kept_in_the_output_folder(tmp_path):
    lit(tmp_path, options=dict(max_steps=1))
    (stored,) = (tmp_path / "reference_logprobs").glob("*.safetensors")
    scored = stored.stat().st_mtime_ns
    again = lit(tmp_path, options=dict(max_steps=1))
    assert stored.stat().st_mtime_ns == scored and again.pairs[0].chosen_ref_logprob < 0


def test_the_length_penalty_wraps_a_reward():
    def graded(completions, **columns):
        return [1.0, None, 0.5]

    wrapped = with_length_penalty(graded, k=1.0, q=0.0, weight=0.1)
    assert wrapped(prompts=[0] * 3, completions=[0] * 3, completion_ids=[[1], [1, 1], [1] * 4]) == [
        pytest.approx(0.9),
        None,
        pytest.approx(0.1),
    ]
    assert wrapped.__name__ == "graded"
    with pytest.raises(ValueError, match="weight is -1"):
        with_length_penalty(graded, k=1.0, q=0.0, weight=-1)
    with pytest.raises(ValueError, match="k is 0"):
        with_length_penalty(graded, k=0, q=0.0, weight=1)


class Waiting:
    async def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


ASYNC = [Waiting().__call__, Waiting(), partial(Waiting().__call__, k=1), partial(Waiting(), k=1)]


@pytest.mark.parametrize("reward", ASYNC)
def test_an_async_reward_has_no_penalty_around_it(reward):
    with pytest.raises(TypeError, match="is async: take the penalty off inside it"):
        with_length_penalty(reward, k=1.0, q=0.0, weight=0.1)


def test_a_lift_that_is_no_number_is_not_logged(tmp_path, monkeypatch):
    """As where no row had a reward with and without its hint; a log with a NaN is no JSON."""
    monkeypatch.setattr("composer_nb.training.hinting.teacher_lift", lambda *given, **more: math.nan)
    trainer = lit(tmp_path, lift_steps=1, options=dict(max_steps=2))
    trainer.train()
    assert not trainer._lifts and trainer._next_lift > 1
    assert not any("sdpo/lift" in row for row in trainer.state.log_history)


SHARDED = [
    (SimpleNamespace(fsdp_version=1), {}, "FSDP version 2, not 1.*beta_replay=0"),
    (SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True), {}, "cpu_ram_efficient_loading"),
    (SimpleNamespace(fsdp_version=2), {"grad_norm_steps": 4}, "grad_norm_steps=4"),
    (SimpleNamespace(fsdp_version=2), {"lift_steps": 1}, "lift_steps=1"),
    (SimpleNamespace(fsdp_version=2), {"rlsd": 0.5}, "rlsd=0.5"),
    (SimpleNamespace(fsdp_version=2), {"teacher": "ema"}, "adapters or 16-bit"),
    (
        SimpleNamespace(fsdp_version=2),
        {"hint_mode": "verified"},
        "hint_mode='verified'.*set hint_mode='distil'",
    ),
    (None, {}, "ZeRO-3.*beta_replay=0"),
]


@pytest.mark.parametrize("fsdp, settings, said", SHARDED)
def test_shards_that_channels_cannot_run_with_are_refused(fsdp, settings, said):
    deepspeed = SimpleNamespace(zero_stage=3) if fsdp is None else None
    kind = DistributedType["DEEPSPEED" if fsdp is None else "FSDP"]
    accelerator = SimpleNamespace(
        distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
    )
    args = SimpleNamespace(
        **{"grad_norm_steps": 0, "lift_steps": 0, "rlsd": 0.0, "teacher": "live", "hint_mode": "distil"}
        | settings
    )
    with pytest.raises(ValueError, match=said):
        refuse_shards(accelerator, args, tiny.model().to(torch.bfloat16))


def test_zero_3_is_refused_when_the_trainer_is_built(tmp_path, monkeypatch):
    """DeepSpeed is not installed here, so the state of the accelerator says it as soon as there is one."""
    plugin, create = SimpleNamespace(zero_stage=3), GRPOTrainer.create_accelerator_and_postprocess

    def with_deepspeed(trainer):
        create(trainer)
        monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", property(lambda state: plugin))

    monkeypatch.setattr(GRPOTrainer, "create_accelerator_and_postprocess", with_deepspeed)
    with pytest.raises(ValueError, match="do not run under ZeRO-3: use FSDP version 2, DDP or ZeRO-2"):
        lit(tmp_path)


@pytest.mark.parametrize("teacher", ["live", "ema"])
def test_reentrant_checkpointing_takes_the_same_step(tmp_path, teacher):
    found = []
    for reentrant in (True, False):
        options = dict(max_steps=1, gradient_checkpointing=True, learning_rate=1e-3)
        options |= dict(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(0)
        made = lit(tmp_path / str(reentrant), options=options, grad_norm_steps=0, teacher=teacher)
        found.append(record(made)[1][0])
        assert log(made)[0]["sdpo/tokens"] > 0 and log(made)[0]["replay/pairs"] > 0
    largest = max((a - b).abs().max().item() for a, b in zip(*found, strict=True))
    assert largest < 1e-5 * max(g.abs().max().item() for g in found[0])


def test_prompt_tuning_is_refused_when_the_trainer_is_built(tmp_path):
    from peft import PromptTuningConfig, TaskType

    learned = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PromptTuningConfig puts virtual tokens"):
        lit(tmp_path, peft_config=learned)


def test_a_series_is_read_also_when_every_step_is_logged():
    """TRL empties its buffers after each log: with `logging_steps=1` every step brings a new list of one."""
    watch, told = SeriesWatch(lambda key, sentence: told.append(key)), []
    for step in range(4):
        watch.look({"entropy": [float(step)]})
    longer = []
    for step in range(3):
        longer.append(float(step))
        watch.look({"completions/mean_length": longer})
    assert watch.history["entropy"] == [0.0, 1.0, 2.0, 3.0] and watch.history["completion_length"] == [
        0.0,
        1.0,
        2.0,
    ]


@pytest.mark.parametrize(
    "options", [dict(bf16=False), dict(gradient_accumulation_steps=4), dict(scale_rewards=False)]
)
def test_trls_fields_as_keywords_are_refused(tmp_path, options):
    with pytest.raises(TypeError, match=f"{next(iter(options))} is TRL's: set it in ComposerConfig"):
        build(tmp_path, **options)


def test_another_class_of_arguments_is_refused(tmp_path):
    class Mine(GRPOConfig):
        pass

    with pytest.raises(TypeError, match="args is a Mine: pass a ComposerConfig"):
        adopt(Mine(str(tmp_path), use_cpu=True, bf16=False, report_to="none"), {})


def test_the_model_card_names_the_method_and_cites_grpo_as_grpo(tmp_path):
    build(tmp_path, alpha_sdpo=0.0, beta_replay=0.0).create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert "trained with GRPO with hint self-distillation and trace-replay preferences (composer_nb)." in card
    assert "introduced in" not in card and "Cite Composer" not in card
    cited = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    ours, grpo = card.partition("% GRPO, the policy term alone:\n")[::2]
    for value in (
        cited["title"],
        cited["authors"][0]["name"],
        cited["repository-code"],
        cited["license"],
        str(cited["version"]),
    ):
        assert f"{{{value}}}" in ours
    assert "shao2024deepseekmath" not in ours and grpo.startswith("@article{shao2024deepseekmath")
