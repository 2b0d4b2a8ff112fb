"""A run from a file: read as TRL reads its own, refused by name, trained, saved, scored."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.replay.dataset import preference_dataset
from composer_nb.traces.pair import DPOPair
from composer_nb.training.command import RunOptions, pairs_at, read_run
from composer_nb.training.pairs import as_pairs

SHELL = CliRunner()
QUIET = dict(use_cpu=True, bf16=False, report_to="none")


def config(folder: Path, **fields: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dict(output_dir=str(folder / "out"), **QUIET) | fields))
    return path


def test_words_win_over_the_file(tmp_path):
    options, args = read_run(
        ["--max_steps", "3", "--heldout", "5"], config(tmp_path, max_steps=9, alpha_sdpo=0.7)
    )
    assert (args.max_steps, args.alpha_sdpo, options.heldout) == (3, 0.7, 5)


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(alpha_spdo=1.0), "alpha_spdo"),
        (dict(alpha_sdpo=-1.0), "alpha_sdpo=-1.0"),
        (dict(kl_estimator="k1"), "beta=0"),
        (dict(heldout=-1), "heldout=-1"),
        (dict(heldout=0, longest_answer=32), "longest_answer=32 has no effect with heldout=0"),
        (
            dict(loss_type="grpo", max_completion_length=40, generation_kwargs={"max_new_tokens": 20}),
            "max_completion_length=40",
        ),
        (dict(loss_type="grpo", vespo_k_pos=1.0), "vespo_k_pos=1.0 has no effect without loss_type='vespo'"),
        (dict(beta_replay=0.2), "beta_replay=0.2 has no effect without pairs"),
        (dict(dpo_variant="simpo"), "dpo_variant='simpo' has no effect without pairs"),
        (dict(dpo_variant="simpo", simpo_gamma=0.3), "no effect without pairs"),
        (dict(pairs="none.parquet"), "pairs='none.parquet': no such"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(tmp_path, fields, says):
    done = SHELL.invoke(app, ["train", str(config(tmp_path, **fields))])
    assert done.exit_code == 1 and says in done.output


@pytest.mark.parametrize("heldout, says", [("0", "nothing to score"), ("-1", "heldout=-1 is negative")])
def test_eval_without_questions_is_one_line(heldout, says):
    done = SHELL.invoke(app, ["eval", "smollm2-135m", "--heldout", heldout])
    assert done.exit_code == 1 and says in done.output and done.output.count("\n") == 1


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_pairs_of_an_export_reach_channel_three(tmp_path, kind):
    context = [{"role": "user", "content": "Say red."}]
    made = preference_dataset([DPOPair("a", context, "red", "blue"), DPOPair("b", context, "red", "no")])
    path = tmp_path / f"pairs.{kind}"
    made.to_parquet(path) if kind == "parquet" else made.to_json(path)
    options, _ = read_run([], config(tmp_path, pairs=str(path), beta_replay=0.2))
    found = [
        (p.state_id, p.state_messages[0]["content"], p.chosen, p.rejected)
        for p in as_pairs(pairs_at(options.pairs))
    ]
    assert found == [("a", "Say red.", "red", "blue"), ("b", "Say red.", "red", "no")]
    with pytest.raises(ValueError, match="no effect with beta_replay=0"):
        read_run([], config(tmp_path, pairs=str(path), beta_replay=0.0))


def test_a_missing_file_says_what_to_write(tmp_path):
    done = SHELL.invoke(app, ["train", str(tmp_path / "none.yaml")])
    assert done.exit_code == 1 and "no such file" in done.output and "output_dir" in done.output


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="task='chess'"):
        RunOptions(task="chess")


@pytest.mark.model
def test_train_and_eval_from_a_shell_agree(tmp_path):
    path = config(
        tmp_path, questions=4, heldout=2, longest_prompt=165, longest_answer=6, max_steps=1,
        num_generations=2, per_device_train_batch_size=2, max_completion_length=4, beta_replay=0.0,
        teacher="live", gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trained = SHELL.invoke(app, ["train", str(path)])
    assert trained.exit_code == 0, trained.output
    asked = ["--heldout", "2", "--longest-prompt", "165", "--longest-answer", "6"]
    scored = SHELL.invoke(app, ["eval", str(tmp_path / "out"), *asked])
    found = [re.findall(r"(graded|exact): ([0-9.]+)", done.output) for done in (trained, scored)]
    assert scored.exit_code == 0 and len(found[0]) == 2 and found[0] == found[1]


@pytest.mark.model
def test_a_checkpoint_that_a_file_names_is_resumed_from(tmp_path):
    path = config(
        tmp_path, questions=2, longest_prompt=165, max_steps=1, num_generations=2, max_completion_length=4,
        per_device_train_batch_size=2, gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
        resume_from_checkpoint=str(tmp_path / "nowhere"),
    )  # fmt: skip
    done = SHELL.invoke(app, ["train", str(path)])
    assert done.exit_code == 1 and "nowhere" in (done.output + str(done.exception))
