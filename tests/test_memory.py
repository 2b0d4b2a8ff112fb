"""The memory that a step is said to hold: the table's arithmetic, each item against the real thing, the whole
against PyTorch's profiler, and the command.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import Trainer
from trl.trainer import utils as trl_utils
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.drills.memory import by_phase, llama, small_trainer
from composer_nb.forward.shared_body import SharedCalls, padded_states, sharing_prefixes
from composer_nb.forward.sharing import paying_plan
from composer_nb.self_teacher import SelfTeacher
from composer_nb.training import memory
from composer_nb.training.activations import (
    head_bytes,
    model_costs,
    parts_of,
    positions_of,
    prompt_positions,
    saved_bytes,
    stand_ins,
    token_costs,
)
from composer_nb.training.command import RunOptions, read_run
from composer_nb.training.config import ComposerConfig
from composer_nb.training.memory import PHASES, MemoryItem, MemoryTable, run_memory, step_memory
from composer_nb.training.sharing import TILE

SHELL = CliRunner()
LENGTHS = dict(prompt=60, hint=10, pair=12, common=30)


def configuration(**options):
    quiet = dict(use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    small = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=16)
    return ComposerConfig("unused", **(quiet | small | options))


def listed(lengths=LENGTHS, **options):
    return step_memory(tiny.model(), configuration(**options), **lengths)


# The table


ITEMS = st.lists(st.tuples(st.integers(0, 10**12), st.sets(st.sampled_from(PHASES))), max_size=8)


@given(ITEMS)
def test_the_peak_is_the_fullest_phase(drawn):
    table = MemoryTable(tuple(MemoryItem(str(i), size, tuple(at)) for i, (size, at) in enumerate(drawn)))
    held = {phase: sum(size for size, at in drawn if phase in at) for phase in PHASES}
    assert {phase: table.held(phase) for phase in PHASES} == held
    assert table.peak == max(held.values()) == held[table.fullest]


def test_a_table_without_a_phase_does_not_look_there():
    items = (MemoryItem("a", 5, ("hints",)), MemoryItem("b", 3, ("policy",)))
    assert MemoryTable(items).peak == 5 and MemoryTable(items, ("policy", "update")).peak == 3


def test_an_unknown_item_is_named_with_those_that_there_are():
    with pytest.raises(KeyError, match="'cash' is not an item.*weights, optimizer"):
        listed()["cash"]


def test_the_text_shows_every_item_and_the_peak():
    table = listed()
    lines = memory.table_text(table).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:-2]] == [item.name for item in table.items]
    assert lines[-1] == f"peak: {table.peak / 2**20:,.1f} MiB, in the phase {table.fullest!r}"
    assert len({len(line) for line in lines[:-1]}) == 1


# What is held throughout


def test_tied_weights_count_once():
    tied, untied = tiny.model(), tiny.model()
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    assert memory.model_bytes(untied) - memory.model_bytes(tied) == tied.lm_head.weight.nbytes
    assert memory.optimizer_bytes(memory.trainable(tied), "adamw_torch") == 8 * sum(
        p.numel() for p in tied.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*memory.STATES, "adafactor"])
def test_optimizer_bytes_are_those_of_the_real_one(kind, dtype):
    model = tiny.model(dtype=dtype, vocab_size=256)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(configuration(optim=kind))
    optimizer = cls(model.parameters(), **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim() > 0]
    assert memory.optimizer_bytes(model.parameters(), kind) == memory.storage_bytes(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["live", "frozen", "ema", "trust_region"])
def test_teacher_bytes_are_those_of_the_real_one(kind, dtype):
    student = tiny.model(dtype=dtype, vocab_size=256).train()
    teacher = SelfTeacher(student, kind)
    kept = list(teacher.average.values())
    if teacher.copy is not None:
        kept += [*teacher.copy.parameters(), *teacher.copy.buffers()]
    assert memory.teacher_bytes(student, kind) == memory.storage_bytes(kept)
    assert (memory.storage_bytes(kept) == 0) == (kind == "live")


@pytest.mark.parametrize("kind", ["live", "frozen", "ema", "trust_region"])
def test_adapters_train_alone_and_need_no_copy(kind):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = get_peft_model(tiny.model(vocab_size=256), lora)
    kept = SelfTeacher(model, kind).average.values()
    assert memory.teacher_bytes(model, kind) == memory.storage_bytes(kept)
    table = step_memory(model, configuration(teacher=kind, beta=0.1), **LENGTHS)
    adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert table["reference"] == 0 and table["gradients"] == adapters < table["weights"] / 4
    assert model_costs(model, configuration(), 100).head == 0  # it does not train


def test_dropout_forbids_sharing_in_trl_passes_only():
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    costs = model_costs(get_peft_model(tiny.model(vocab_size=256), lora), configuration(), 100)
    assert (costs.levels, costs.policy_levels) == (2, 0)


def test_a_reference_is_held_where_beta_is_not_zero():
    assert listed()["reference"] == 0
    assert listed(beta=0.1)["reference"] == listed()["weights"]


# Positions


BATCHES = st.fixed_dictionaries(
    dict(
        groups=st.integers(1, 4),
        size=st.integers(1, 4),
        common=st.integers(0, 30),
        shared=st.integers(0, 30),
        own=st.integers(1, 20),
    )
)


@settings(max_examples=60)
@given(BATCHES, st.sampled_from([0, 1, 2]))
def test_positions_are_those_of_the_plan(batch, levels):
    rows, found = stand_ins(**batch), positions_of(**batch, levels=levels)
    plan = paying_plan(rows, levels) if levels else None
    if plan is None:
        whole, length = len(rows), len(rows[0])
        assert (found.run, found.reused, found.squares) == (whole * length, 0, whole * length**2)
        return
    assert found.run == plan.computed_tokens
    assert found.run <= plan.positions  # passes that pad run a few more
    assert found.reused == sum(before for before, _ in parts_of(plan))
    assert all(before + own <= len(rows[0]) for before, own in parts_of(plan))


@pytest.mark.parametrize("levels", [1, 2])
def test_positions_are_those_that_a_model_runs(levels):
    batch, calls = dict(groups=3, size=2, common=40, shared=20, own=8), SharedCalls()
    ids = torch.tensor(stand_ins(**batch))
    assert padded_states(tiny.model().base_model, ids, torch.ones_like(ids), calls, levels) is not None
    assert positions_of(**batch, levels=levels).run == calls.positions < ids.numel()


@pytest.mark.parametrize("common", [0, 45])
def test_prompts_are_read_as_sampling_reads_them(common):
    model, prompt = tiny.model(), 60
    ids = torch.tensor(stand_ins(3, 1, common, 0, prompt - common)).repeat_interleave(2, dim=0) + 3
    with sharing_prefixes(model) as calls:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert prompt_positions(3, prompt, common, 2) == calls.positions == common + 3 * (prompt - common)


def test_what_all_prompts_begin_with_is_worth_memory():
    apart, alike = (
        step_memory(tiny.model(), configuration(), **(LENGTHS | {"common": n, "prompt": 200}))
        for n in (0, 150)
    )
    assert all(
        alike[name] < apart[name] for name in ("activations", "pairs", "prompts' pass", "teacher's pass")
    )
    assert alike["cache"] == apart["cache"] and alike["weights"] == apart["weights"]


# What a pass keeps


def test_the_model_is_left_as_it_was():
    model = tiny.model().train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].eval()
    before = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    values = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    step_memory(model, configuration(), **LENGTHS)
    assert [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()] == before
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(values, model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_longer_row_keeps_what_the_formula_says():
    model = tiny.model().train()
    costs, ids = token_costs(model), torch.ones(2, 200, dtype=torch.long)
    mask = ids.clone()
    mask[:, 0] = 0
    seen = saved_bytes(model, lambda: model.base_model(input_ids=ids, attention_mask=mask, use_cache=False))
    assert costs(positions_of(2, 1, own=200)) == pytest.approx(seen, rel=0.01)  # angles: once for both rows


def test_checkpointing_keeps_states_only_and_runs_a_layer_again():
    plain, again = listed(), listed(gradient_checkpointing=True)
    costs = model_costs(tiny.model(), configuration(), 100)
    assert again["activations"] == 4 * (60 + 16) * costs.layers * costs.state < plain["activations"]
    assert again["a layer again"] > plain["a layer again"] == 0
    assert again["pairs"] < plain["pairs"]


def test_sharing_changes_passes_and_head_on_a_cpu():
    on, off = listed(share_prefixes=True), listed(share_prefixes=False)
    names = ("activations", "head, forward", "head, backward", "prompts' pass")
    assert all(on[name] < off[name] for name in names)
    assert on["pairs"] == off["pairs"]  # the channels share in any case
    costs = model_costs(tiny.model(), configuration(), 100)
    assert on["head, forward"] == head_bytes(costs, 4 * 16, "cpu", TILE)[0]
    assert off["head, forward"] == head_bytes(costs, 4 * (60 + 16 - 1), "cpu")[0]


def test_on_a_gpu_the_head_scores_completions_either_way():
    model = tiny.model()
    on, off = (
        step_memory(model, configuration(share_prefixes=share), **LENGTHS, device="cuda")
        for share in (True, False)
    )
    assert on["head, forward"] == off["head, forward"] == 4 * 16 * 32768 * 4


@pytest.mark.parametrize("share", [True, False])
def test_the_head_scores_what_is_said(tmp_path, monkeypatch, share):
    trainer, lengths = small_trainer(tmp_path, llama(), max_steps=1, share_prefixes=share)
    shape, own, seen = memory.step_shape(trainer.args, **lengths), trl_utils._ChunkedLogProbFunction, []

    class Watched:
        @staticmethod
        def apply(hidden, *rest):
            seen.append((len(hidden), rest[4]))
            return own.apply(hidden, *rest)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Watched)
    trainer.train()
    tokens, width = memory.scored_by_head(trainer.args, shape, "cpu")
    assert {w for _, w in seen} == {width}
    assert all(0.9 * tokens <= n <= tokens for n, _ in seen) and seen


# The whole


@pytest.mark.parametrize(
    "options", [{}, dict(share_prefixes=False), dict(sdpo_fused=False, sdpo_jsd_beta=0.5)]
)
def test_the_estimate_is_near_what_the_profiler_saw(tmp_path, options):
    trainer, lengths = small_trainer(tmp_path, llama(layers=3), **options)
    table = step_memory(trainer.model, trainer.args, **lengths)
    begun = table["weights"] + table["teacher"]
    seen = {phase: size + begun for phase, size in by_phase(trainer).items()}
    parts = [("sampling",), ("policy",), ("hints",), ("pairs", "backward"), ("update",)]
    ratio = {at: max(map(table.held, at)) / max(map(seen.get, at)) for at in parts}  # pairs: see the chapter
    assert all(1 / 1.15 < r < 1.15 for r in ratio.values()), ratio
    assert 1 / 1.15 < table.peak / max(seen.values()) < 1.15, ratio


def test_without_channels_the_first_gradients_come_as_results_go(tmp_path):
    model = llama(layers=6, hidden=192, intermediate_size=768)
    trainer, lengths = small_trainer(tmp_path, model, alpha_sdpo=0.0, beta_replay=0.0, teacher="live")
    table = step_memory(trainer.model, trainer.args, **lengths | dict(pair=0))
    seen = {phase: size + table["weights"] for phase, size in by_phase(trainer).items()}
    ratio = {phase: table.held(phase) / seen[phase] for phase in table.phases}
    assert all(1 / 1.15 < r < 1.15 for r in ratio.values()), ratio
    late = next(item for item in table.items if item.name == "gradients")
    assert late.phases == ("update",) and late.size > 0.1 * table.held("backward")


def test_accumulated_gradients_are_held_from_the_first_pass_on():
    bare = LENGTHS | dict(pair=0)
    once, twice = listed(bare), listed(bare, gradient_accumulation_steps=2)
    gradients = once["gradients"]
    assert twice.held("update") == once.held("update") and twice["gradients"] == gradients
    held = [item.phases for t in (once, twice) for item in t.items if item.name == "gradients"]
    assert held[0] == ("update",) and {"policy", "backward", "update"} <= set(held[1])


def test_pairs_come_first_and_leave_their_gradients_behind():
    off = dict(alpha_sdpo=0.0, teacher="live")
    bare, first = listed(LENGTHS | dict(pair=0), **off), listed(**off)
    together = listed(hint_mode="gated", gate_cap=0.5, **off)  # a cap wants all channels in one backward pass
    phases = {
        name: {i.name: i.phases for i in t.items}
        for name, t in (("bare", bare), ("first", first), ("together", together))
    }
    assert "pairs" not in phases["first"]["activations"] and "pairs" in phases["together"]["activations"]
    assert "policy" in phases["first"]["gradients"] and "policy" not in phases["together"]["gradients"]
    assert "policy" not in phases["bare"]["gradients"]
    assert first["pairs"] == together["pairs"] > 0 and first.held("pairs") < together.held("pairs")


# What is refused


def test_verified_retakes_have_no_estimate():
    with pytest.raises(ValueError, match="no estimate for hint_mode='verified'.*look at the peak"):
        listed(hint_mode="verified", teacher="live")


@pytest.mark.parametrize(
    "lengths, says",
    [
        (dict(prompt=0), "prompt=0"),
        (dict(prompt=9, hint=-1), "hint=-1"),
        (dict(prompt=9, pair=-2), "pair=-2"),
        (dict(prompt=9, common=-3), "common=-3"),
        (dict(prompt=9, common=10), "common=10"),
        (dict(prompt=9, device="mps"), "device='mps'"),
    ],
)
def test_a_length_or_device_without_sense_is_named(lengths, says):
    with pytest.raises(ValueError, match=says):
        step_memory(tiny.model(vocab_size=256), configuration(), **lengths)


def test_an_unknown_optimizer_and_a_frozen_model_are_refused():
    with pytest.raises(ValueError, match="adamw_bnb_8bit.*STATES"):
        memory.optimizer_bytes(tiny.model(vocab_size=256).parameters(), "adamw_bnb_8bit")
    with pytest.raises(ValueError, match="no parameter of this model is trainable"):
        step_memory(tiny.model(vocab_size=256).requires_grad_(False), configuration(), prompt=9)


# The command


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny.saved_model(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    fields = dict(
        output_dir=str(folder / "out"), model=str(folder / "model"), questions=4, longest_prompt=200,
        use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2, num_generations=2,
        max_completion_length=8,
        gradient_checkpointing=False,
    )  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def test_the_command_prints_the_table_of_the_file(run_file):
    table = memory.run_memory(*read_run([], run_file))
    command = [sys.executable, "-W", "ignore", "-c", "from composer_nb.cli import main; main()", "memory"]
    done = subprocess.run([*command, str(run_file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == memory.table_text(table).strip()
    assert table["pairs" if "pairs" in table.phases else "weights"] > 0 and "pairs" not in table.phases
    assert not (run_file.parent / "out").exists()  # nothing was trained


def test_words_and_device_reach_the_table(run_file):
    done = SHELL.invoke(app, ["memory", str(run_file), "--device", "cuda", "--teacher", "live"])
    assert done.exit_code == 0, done.output
    table = memory.run_memory(*read_run(["--teacher", "live"], run_file), device="cuda")
    assert memory.table_text(table) in done.output and table["teacher"] == 0


def test_prompts_of_a_run_begin_alike(run_file, monkeypatch):
    seen = {}
    monkeypatch.setattr(memory, "step_memory", lambda model, args, **given: seen.update(given))
    memory.run_memory(*read_run([], run_file))
    assert 0 < seen["common"] < seen["prompt"] <= 200 and seen["hint"] > 0 and seen["device"] == "cpu"


@pytest.mark.parametrize(
    "text, words, says",
    [
        ("- a list", [], "holds no fields"),
        ("", [], "holds no fields"),
        ("a: [", [], "is no YAML"),
        ("alpha_spdo: 1.0", [], "alpha_spdo"),
        (None, ["--device", "mps"], "device='mps'"),
        (None, ["--model", "./nothing-here"], "nothing-here"),
        (None, ["--longest_prompt", "1"], "longest_prompt=1"),
        (None, ["--optim", "adamw_bnb_8bit"], "adamw_bnb_8bit"),
    ],
)
def test_bad_input_gets_one_line(run_file, tmp_path, text, words, says):
    path = run_file
    if text is not None:
        path = tmp_path / "bad.yaml"
        path.write_text(
            text
            if text.startswith("-") or not text
            else f"output_dir: out\nuse_cpu: true\nbf16: false\n{text}"
        )
    done = SHELL.invoke(app, ["memory", str(path), *words])
    said = [line for line in done.output.splitlines() if line.strip() and "Loading weights" not in line]
    assert done.exit_code == 1 and len(said) == 1
    assert said[0].startswith("composer-nb memory: ") and says in said[0]


def test_a_missing_file_says_what_to_write(tmp_path):
    done = SHELL.invoke(app, ["memory", str(Path(tmp_path, "none.yaml"))])
    assert done.exit_code == 1 and "no such file" in done.output and "output_dir" in done.output


def test_a_run_without_questions_is_refused_before_anything_is_computed(run_file):
    options, args = read_run(["--longest_prompt", "1"], run_file)
    assert isinstance(options, RunOptions)
    with pytest.raises(ValueError, match="no question has at most longest_prompt=1"):
        memory.run_memory(options, args)


def test_a_file_that_names_pairs_counts_them(tmp_path):
    """The longest reply stands behind a prompt as long as the longest question's."""
    rows = [{"prompt": [{"role": "user", "content": "x"}], "chosen": "word " * 60, "rejected": "no"}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = configuration(beta_replay=0.1)
    told = dict(questions=4, heldout=2)
    named = {"pairs": str(tmp_path / "pairs.jsonl")}
    without, with_pairs = (run_memory(RunOptions(**told, **more), args, "cpu") for more in ({}, named))
    assert with_pairs.held("pairs") > without.held("pairs")


def test_a_pairs_own_long_context_counts(tmp_path):
    said = {"short.jsonl": "x", "long.jsonl": "word " * 900}
    held = {}
    for name, text in said.items():
        row = {"prompt": [{"role": "user", "content": text}], "chosen": "yes", "rejected": "no"}
        (tmp_path / name).write_text(json.dumps(row))
        options = RunOptions(questions=4, heldout=2, pairs=str(tmp_path / name))
        held[name] = run_memory(options, configuration(beta_replay=0.1), "cpu").held("pairs")
    assert held["long.jsonl"] > held["short.jsonl"]
