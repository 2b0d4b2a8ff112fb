"""The self-teacher: what each kind scores with, what it costs, and that the student never notices."""

import contextlib
import gc

import peft
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from composer_nb.forward import encode_shared
from composer_nb.self_teacher import SelfTeacher

KINDS = ["live", "frozen", "ema", "trust_region"]
IDS = torch.arange(3, 13).unsqueeze(0)


def adapted(seed: int = 0, **options) -> peft.PeftModel:
    """A tiny Llama with LoRA that already does something; base and adapters are the same for one seed."""
    base = tiny.model(vocab_size=64)
    torch.manual_seed(seed)
    options = dict(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False) | options
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.normal_(0, 0.5)
    return model.eval()


def plain(seed: int = 0) -> nn.Module:
    return tiny.model(seed=seed, vocab_size=64)


MAKERS = {"full": plain, "lora": adapted}


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def push(model: nn.Module, seed: int = 5, scale: float = 0.3) -> None:
    """One step of training, as far as a teacher can tell."""
    draw = torch.Generator().manual_seed(seed)
    for p in trainable(model).values():
        p += (scale * torch.randn(p.shape, generator=draw)).to(p)


@torch.no_grad()
def scores(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def snapshot(model: nn.Module) -> dict:
    """Everything a teacher might leave behind: values, storages, flags, modes, adapter switches, the set of
    tensors.
    """
    return {
        "values": {name: p.detach().clone() for name, p in model.named_parameters()},
        "storage": {name: p.data_ptr() for name, p in model.named_parameters()},
        "objects": {name: id(p) for name, p in model.named_parameters()},
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: m.training for name, m in model.named_modules()},
        "disabled": {
            name: m.disable_adapters for name, m in model.named_modules() if hasattr(m, "disable_adapters")
        },
    }


def assert_untouched(model: nn.Module, before: dict) -> None:
    after = snapshot(model)
    for part in before.keys() - {"values"}:
        assert after[part] == before[part], part
    assert all(torch.equal(after["values"][name], value) for name, value in before["values"].items())


# --- what each kind scores with -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_live_is_the_student_to_the_last_bit(make):
    student = make()
    teacher = SelfTeacher(student, "live")
    push(student)
    teacher.update()
    assert torch.equal(teacher.mix(scores), scores(student)) and teacher.copy is None
    assert not teacher.mix(lambda module: module(input_ids=IDS).logits).requires_grad


def test_frozen_never_moves():
    student = plain()
    before = scores(student)
    teacher = SelfTeacher(student, "frozen")
    for seed in range(3):
        push(student, seed)
        teacher.update()
    assert torch.equal(teacher.mix(scores), before) and not torch.equal(scores(student), before)


def test_frozen_under_peft_is_the_base_with_adapters_off():
    student = adapted()
    teacher = SelfTeacher(student, "frozen")
    push(student)
    assert torch.equal(teacher.mix(scores), scores(plain()))
    assert not torch.equal(scores(student), scores(plain()))


@settings(max_examples=20, deadline=None)
@given(rate=st.floats(0.01, 1.0), steps=st.integers(0, 6), lora=st.booleans())
def test_the_average_has_its_closed_form(rate, steps, lora):
    student = TOY_LORA() if lora else nn.Linear(3, 2).double()
    path = [{name: p.detach().clone().double() for name, p in trainable(student).items()}]
    teacher = SelfTeacher(student, "ema", rate)
    for step in range(steps):
        push(student, step)
        path.append({name: p.detach().clone().double() for name, p in trainable(student).items()})
        teacher.update()
    for name, value in teacher.state_dict().items():
        expected = (1 - rate) ** steps * path[0][name]
        for i in range(1, steps + 1):
            expected = expected + rate * (1 - rate) ** (steps - i) * path[i][name]
        assert torch.allclose(
            value.double(), expected, atol=1e-6 if lora else 1e-12, rtol=1e-5 if lora else 1e-9
        )


def TOY_LORA() -> nn.Module:
    return peft.get_peft_model(
        nn.Sequential(nn.Linear(3, 2)), peft.LoraConfig(r=1, target_modules=["0"], init_lora_weights=False)
    )


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_averaged_teacher_scores_with_the_average(make):
    student, expected = make(), make()
    teacher = SelfTeacher(student, "ema", rate=0.25)
    push(student)
    teacher.update()
    with torch.no_grad():
        for mine, theirs in zip(expected.parameters(), student.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
    assert torch.equal(teacher.mix(scores), scores(expected))
    assert not torch.equal(scores(expected), scores(student))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_a_trust_region_mixes_logits(make, rate):
    student = make()
    teacher = SelfTeacher(student, "trust_region", rate)
    push(student)
    frozen, live, mixed = scores(plain()), scores(student), teacher.mix(scores)
    if rate in (0.0, 1.0):
        assert torch.equal(mixed, live if rate else frozen) and len(teacher.views()) == 1
    else:
        assert torch.allclose(mixed, torch.lerp(frozen, live, rate), atol=1e-6)
        geometric = frozen.softmax(-1) ** (1 - rate) * live.softmax(-1) ** rate
        assert torch.allclose(mixed.softmax(-1), geometric / geometric.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_views_sum_to_one_and_are_in_eval_mode(kind, make):
    student = make().train()
    views = SelfTeacher(student, kind, 0.3).views()
    assert sum(weight for weight, _ in views) == pytest.approx(1.0) and len(views) == 1 + (
        kind == "trust_region"
    )
    for _, view in views:
        with view as module:
            assert not any(m.training for m in module.modules())
    assert student.training
    if kind != "trust_region":
        with SelfTeacher(student, kind, 0.3).use() as module:
            assert not module.training


def test_a_forbidden_token_stays_forbidden_and_gives_no_nan():
    student = nn.Linear(2, 3)
    student.weight.data.zero_()
    student.bias.data = torch.tensor([0.0, 1.0, float("-inf")])
    for rate in (0.0, 0.5, 1.0):
        teacher = SelfTeacher(student, "trust_region", rate)
        assert teacher.mix(lambda m: m(torch.ones(1, 2))).tolist() == [[0.0, 1.0, float("-inf")]]


def test_a_teacher_reads_shared_prefixes():
    student = adapted()
    ids = torch.tensor([[*range(3, 15), 20, 21], [*range(3, 15), 30, 31]])
    for kind in KINDS:
        teacher = SelfTeacher(student, kind, 0.3)
        push(student)
        at = torch.tensor([0, 1]), torch.tensor([13, 12])

        def shared(module, at=at):
            encoded = encode_shared(module, ids, torch.ones_like(ids), torch.tensor([12, 12]))
            assert encoded.positions == 12 + 4
            return encoded.logits(*at)

        with torch.no_grad():
            whole = teacher.mix(lambda m, at=at: m(input_ids=ids).logits[at[0], at[1] - 1])
            assert torch.allclose(teacher.mix(shared), whole, atol=1e-5)


# --- the student never notices ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_students_backward_is_the_one_without_a_teacher(kind, make, checkpointing):
    def gradient(with_teacher: bool) -> torch.Tensor:
        student = make().train()
        if checkpointing:
            student.enable_input_require_grads()
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        teacher = SelfTeacher(student, kind, 0.3)
        push(student)
        loss = student(input_ids=IDS, labels=IDS).loss
        if with_teacher:
            assert torch.isfinite(teacher.mix(scores)).all()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in trainable(student).values()])

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_it_was_also_after_an_exception(kind, make, raises):
    student = make().train()
    next(m for m in student.modules() if isinstance(m, nn.Linear)).eval()  # modes need not be uniform
    next(iter(trainable(student).values())).requires_grad_(False)  # nor flags
    teacher = SelfTeacher(student, kind, 0.3)
    push(student)
    before = snapshot(student)
    for _, view in teacher.views():
        with pytest.raises(KeyError) if raises else contextlib.nullcontext(), view as module:
            module(input_ids=IDS)
            if raises:
                raise KeyError
        assert_untouched(student, before)
    teacher.update()
    assert_untouched(student, before)


def test_autocast_gives_the_teacher_its_own_casts_and_the_student_a_graph():
    student = adapted()
    teacher = SelfTeacher(student, "ema", 0.3)
    push(student, scale=2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = student(input_ids=IDS).logits
        seen = teacher.mix(scores)
        second = student(input_ids=IDS).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = teacher.mix(scores)
    assert torch.equal(seen, alone) and torch.equal(first, second) and not torch.equal(seen, first)
    for logits in (first, second):
        gradients = torch.autograd.grad(
            logits.float().sum(), list(trainable(student).values()), allow_unused=True
        )
        assert all(g is not None for g in gradients)


# --- what it costs ------------------------------------------------------------------------------------------


@pytest.fixture
def new_numbers():
    """Counts the numbers in all tensors that were made since, and are alive."""
    gc.freeze()  # what exists now is not looked at again

    def count() -> int:
        gc.collect()
        made = {
            o.data_ptr(): o.untyped_storage().nbytes()
            for o in gc.get_objects()
            if issubclass(type(o), torch.Tensor)
        }
        return sum(made.values()) // 4

    yield count
    gc.unfreeze()


@pytest.mark.parametrize("kind", KINDS)
def test_with_adapters_no_kind_copies_the_base(kind, new_numbers):
    student = adapted()
    size = sum(p.numel() for p in trainable(student).values())
    whole = new_numbers()
    assert whole >= sum(p.numel() for p in student.parameters()) > 10 * size
    teacher = SelfTeacher(student, kind, 0.3)
    for _ in range(2):
        push(student)
        assert torch.isfinite(teacher.mix(scores)).all()
        teacher.update()
        assert new_numbers() - whole == (size if kind == "ema" else 0)
    assert teacher.copy is None


@pytest.mark.parametrize("kind, copies", [("live", 0), ("frozen", 1), ("ema", 1), ("trust_region", 1)])
def test_full_fine_tuning_costs_one_copy_at_most(kind, copies):
    teacher = SelfTeacher(plain(), kind, 0.3)
    assert (teacher.copy is not None) == bool(copies)
    if copies:
        assert not any(p.requires_grad for p in teacher.copy.parameters())


def test_a_patched_forward_is_not_copied():
    student = plain()
    student.lm_head.forward = lambda hidden: hidden * 0
    teacher = SelfTeacher(student, "frozen")
    assert scores(student).abs().max() == 0 < teacher.mix(scores).abs().max()


def test_buffers_follow_the_student():
    student = nn.BatchNorm1d(2)
    teacher = SelfTeacher(student, "ema", 0.5)
    student.running_mean += 3.0
    teacher.update()
    assert torch.equal(teacher.copy.running_mean, torch.full((2,), 3.0))
    assert set(teacher.state_dict()) == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_averaged_adapters_of_a_bf16_student_take_small_steps():
    student = adapted().bfloat16()
    teacher = SelfTeacher(student, "ema", 0.01)
    push(student, scale=0.02)
    name, p = next(iter(trainable(student).items()))
    start = teacher.average[name].clone()
    for _ in range(600):
        teacher.update()
    assert teacher.average[name].dtype == torch.float32
    assert torch.allclose(teacher.average[name], p.float(), atol=1e-3) and not torch.equal(
        start, teacher.average[name]
    )
    with teacher.use() as module:
        assert {q.dtype for q in module.parameters()} == {torch.bfloat16}


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_is_needed_and_resumes_to_the_same_teacher(kind, make, tmp_path):
    student = make()
    teacher = SelfTeacher(student, kind, 0.3)
    push(student)
    teacher.update()
    state = teacher.state_dict()
    assert bool(state) == (kind == "ema")
    assert len({value.data_ptr() for value in state.values()}) == len(state) and not any(
        v.requires_grad for v in state.values()
    )
    save_file(state, tmp_path / "teacher.safetensors")
    expected = teacher.mix(scores)

    resumed_student = make()
    resumed = SelfTeacher(resumed_student, kind, 0.3)
    push(resumed_student)
    resumed.load_state_dict(load_file(tmp_path / "teacher.safetensors"))
    assert torch.equal(resumed.mix(scores), expected)
    push(student, 7), push(resumed_student, 7)
    teacher.update(), resumed.update()
    assert torch.equal(resumed.mix(scores), teacher.mix(scores))


def test_tied_weights_are_stored_once_and_stay_tied():
    teacher = SelfTeacher(plain(), "ema")
    state = {name: value + 1.0 for name, value in teacher.state_dict().items()}
    assert "lm_head.weight" not in state and "model.embed_tokens.weight" in state
    teacher.load_state_dict(state)
    assert torch.equal(teacher.copy.lm_head.weight, state["model.embed_tokens.weight"])
    assert teacher.copy.lm_head.weight is teacher.copy.model.embed_tokens.weight


def test_a_transposed_weight_can_be_saved(tmp_path):
    student = nn.Linear(3, 2)
    student.weight.data = torch.randn(3, 2).T
    save_file(SelfTeacher(student, "ema").state_dict(), tmp_path / "t.safetensors")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_checkpoint_that_does_not_fit_is_named_and_changes_nothing(make):
    teacher = SelfTeacher(make(), "ema", 0.3)
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    name, *rest = state
    for broken, says in (
        ({n: state[n] for n in rest}, f"lacks {name}: "),
        (dict(list(state.items())[:1]), r"lacks .* and \d+ more"),
        (state | {"other": torch.ones(1)}, "has unexpected other: "),
        (state | {name: torch.ones(3, 3, 3)}, rf"{name} has shape \(3, 3, 3\)"),
        (state | {rest[-1]: torch.full_like(state[rest[-1]], float("nan"))}, f"{rest[-1]} is not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            teacher.load_state_dict({n: v + 1 for n, v in broken.items()})
        assert all(torch.equal(value, state[n]) for n, value in teacher.state_dict().items())
    for kind in ("live", "frozen", "trust_region"):
        SelfTeacher(make(), kind).load_state_dict({})
        with pytest.raises(ValueError, match=f"unexpected .*kind '{kind}'"):
            SelfTeacher(make(), kind).load_state_dict(state)


# --- what is refused ----------------------------------------------------------------------------------------


def test_wrong_settings_are_named():
    student = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unknown teacher 'average'; known: live, frozen, ema, trust_region"):
        SelfTeacher(student, "average")
    for kind, rate in (
        ("ema", 0.0),
        ("ema", -0.1),
        ("ema", 1.1),
        ("trust_region", -0.1),
        ("trust_region", 1.5),
        ("ema", float("nan")),
    ):
        with pytest.raises(ValueError, match="teacher_ema_rate must lie in"):
            SelfTeacher(student, kind, rate)
    with pytest.raises(ValueError, match=r"views\(\)"):
        SelfTeacher(student, "trust_region").use()


def test_what_trains_outside_the_adapters_is_refused_where_adapters_are_switched_off():
    biased = adapted(bias="lora_only", target_modules=["q_proj"])
    biased.base_model.model.model.norm.weight.requires_grad_(True)
    for kind in ("frozen", "trust_region"):
        with pytest.raises(ValueError, match="norm.weight train outside the adapters"):
            SelfTeacher(biased, kind)
    average = SelfTeacher(biased, "ema", 0.3)
    assert any("norm.weight" in name for name in average.average)
    SelfTeacher(adapted(modules_to_save=["norm"]), "frozen")


def test_modules_to_save_are_switched_off_and_averaged_with_the_adapters():
    student = adapted(modules_to_save=["norm"])
    frozen, average = SelfTeacher(student, "frozen"), SelfTeacher(student, "ema", 0.5)
    push(student)
    assert torch.equal(frozen.mix(scores), scores(plain()))
    assert any("modules_to_save" in name for name in average.average)


def test_an_average_of_nothing_is_refused():
    student = adapted().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to average"):
        SelfTeacher(student, "ema")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_a_16_bit_model_takes_small_steps(dtype):
    """Full weights in 16 bits: the average is kept in fp32, so two hundred small steps close the gap."""
    student = tiny.model(dtype=dtype)
    teacher = SelfTeacher(student, "ema", 0.05)
    with torch.no_grad():
        for p in student.parameters():
            p.mul_(1.01)
    for _ in range(200):
        teacher.update()
    assert {value.dtype for value in teacher.average.values()} == {torch.float32}
    with teacher.use() as module:
        assert module is student  # lent, with the average inside
    gaps = [
        (teacher.average[name] - p.float()).norm() / p.float().norm()
        for name, p in student.named_parameters()
    ]
    assert max(gaps) < 1e-3
