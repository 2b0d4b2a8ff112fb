"""A supervised start trains on the answers' tokens of solutions, and on nothing else."""

import pytest
import tiny
import torch
from test_rollouts import FAMILY, TOKENIZER

from composer_nb.tasks.arithmetic import Arithmetic
from composer_nb.training.supervised_start import solution_rows, supervised_start

TASKS = FAMILY.tasks("train", 6)


def test_rows_are_solved_episodes_whose_answers_are_closed():
    for row, task in zip(solution_rows(FAMILY, TASKS, TOKENIZER), TASKS, strict=True):
        assert row.outcome.solved and row.outcome.reward == 1
        said = [TOKENIZER.decode(row.ids[a:b]) for a, b in row.turns]
        assert said == [answer + TOKENIZER.eos_token for answer in FAMILY.reference(task)]


def test_the_loss_is_the_cross_entropy_of_the_answers():
    """By hand on the first batch: every row by itself, unshared, only its sampled tokens."""
    model = tiny.model()
    total, count = 0.0, 0
    for row in solution_rows(FAMILY, FAMILY.tasks("train", 4, 3), TOKENIZER):
        ids = torch.tensor([row.ids])
        logp = model(ids).logits[0, :-1].log_softmax(-1)
        for begin, end in row.turns:
            total -= logp[range(begin - 1, end - 1), ids[0, begin:end]].sum().item()
            count += end - begin
    (loss,) = supervised_start(model, TOKENIZER, FAMILY, 1, size=4, seed=3, progress=False)
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_it_learns_and_is_the_same_twice():
    runs = []
    for _ in range(2):
        model = tiny.model()
        runs.append(
            (supervised_start(model, TOKENIZER, FAMILY, 8, size=2, learning_rate=3e-3, progress=False), model)
        )
    assert runs[0][0] == runs[1][0] and runs[0][0][-1] < runs[0][0][0] - 0.2
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for _, m in runs)))


def test_other_families_work_too():
    (row,) = solution_rows(Arithmetic(), Arithmetic().tasks("train", 1), TOKENIZER)
    assert row.outcome.solved


@pytest.mark.parametrize("bad", [dict(steps=0), dict(steps=1, size=0)])
def test_no_steps_are_refused(bad):
    with pytest.raises(ValueError, match="at least one"):
        supervised_start(tiny.model(), TOKENIZER, FAMILY, progress=False, **bad)
