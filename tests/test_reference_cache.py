"""Reference log-probs: scored once, kept for exactly this model and these tokens, safe against kills and
damage.
"""

import multiprocessing
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from composer_nb import reference_cache
from composer_nb.batch import ComposerDataCollator, DPOPair, pair_ids
from composer_nb.forward import prefix_shortcut
from composer_nb.loss import reference_logprobs
from composer_nb.reference_cache import ReferenceCache, cached_reference_logprobs

TOKENIZER = tiny.tokenizer()
COLLATOR = ComposerDataCollator(TOKENIZER)


def make_pairs(n: int = 7) -> list[DPOPair]:
    "Pairs of ragged length, the longest neither first nor last."
    return [
        DPOPair(
            f"s{i}",
            [{"role": "user", "content": "word " * (1 + 5 * i % 11)}],
            chosen="yes " * (1 + 3 * i % 7),
            rejected=f"no {i}",
            rejected_ids=[5, 6, 7 + i] if i % 2 else None,
        )
        for i in range(n)
    ]


class Spy(ComposerDataCollator):
    "Notes the pairs and the width of each batch."

    def __call__(self, rollouts, pairs=()):
        batch = super().__call__(rollouts, pairs)
        self.batches.append((len(pairs), batch["dpo_chosen_input_ids"].shape[1]))
        return batch


class Counted:
    "A tiny model in float64 that counts its forward passes, notes the batches, and can fail in one of them."

    def __init__(self, seed: int = 0, fail_at: int = -1, side: str = "right") -> None:
        self.model, self.fail_at, self.passes = tiny.model(seed, torch.float64), fail_at, 0
        self.collator = Spy(TOKENIZER, padding_side=side)
        self.collator.batches = self.batches = []
        prefix_shortcut(self.model)  # looks at the model with passes of its own
        self.model.model.register_forward_pre_hook(self.note)

    def note(self, body: nn.Module, args: tuple) -> None:
        assert not body.training and not torch.is_grad_enabled()
        if len(self.batches) - 1 == self.fail_at:
            self.batches.pop()
            raise KeyboardInterrupt
        self.passes += 1

    def score(self, pairs: list[DPOPair], cache: ReferenceCache | None, **options: object) -> list[DPOPair]:
        return cached_reference_logprobs(
            self.model, pairs, self.collator, cache=cache, progress=False, **options
        )

    @property
    def pairs_scored(self) -> int:
        return sum(pairs for pairs, _ in self.batches)


def values(pairs: list[DPOPair]) -> torch.Tensor:
    return torch.tensor([[p.chosen_ref_logprob, p.rejected_ref_logprob] for p in pairs], dtype=torch.float64)


def one_by_one(model: nn.Module, pairs: list[DPOPair]) -> torch.Tensor:
    "Without cache, sorting or padding."
    rows = [reference_logprobs(model, COLLATOR([], [pair])) for pair in pairs]
    return torch.stack(
        [torch.cat([row[f"dpo_{side}_ref_logprobs"] for side in ("chosen", "rejected")]) for row in rows]
    )


# --- scoring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_second_run_calls_the_model_zero_times(tmp_path: Path, side: str) -> None:
    pairs, counted = make_pairs(), Counted(side=side)
    first = counted.score(pairs, ReferenceCache(tmp_path), batch_size=3)
    assert counted.pairs_scored == 7 and len(counted.batches) == 3
    passes = counted.passes
    second = counted.score(list(reversed(pairs)), ReferenceCache(tmp_path), batch_size=2)
    assert counted.passes == passes >= 3
    assert torch.equal(values(second).flip(0), values(first))
    torch.testing.assert_close(values(first), one_by_one(counted.model, pairs), rtol=0, atol=1e-10)
    assert [replace(pair, chosen_ref_logprob=None, rejected_ref_logprob=None) for pair in first] == pairs


def test_a_float32_model_gives_what_it_gives_uncached(tmp_path: Path) -> None:
    pairs, model = make_pairs(), tiny.model()
    cached = cached_reference_logprobs(model, pairs, COLLATOR, cache=ReferenceCache(tmp_path), progress=False)
    torch.testing.assert_close(values(cached), one_by_one(model, pairs).double(), rtol=1e-6, atol=0)


def test_without_a_cache_everything_is_scored_and_nothing_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path))
    counted = Counted()
    assert torch.equal(values(counted.score(make_pairs(), None)), values(counted.score(make_pairs(), None)))
    assert counted.pairs_scored == 14 and list(tmp_path.iterdir()) == []


def test_the_default_folder_is_beside_the_converted_models(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path))
    Counted().score(make_pairs(2), ReferenceCache())
    assert len(list((tmp_path / "references").glob("*.safetensors"))) == 1


def test_only_what_is_missing_is_scored_and_what_a_pair_brings_stays(tmp_path: Path) -> None:
    pairs, counted = make_pairs(4), Counted()
    pairs[1] = replace(pairs[1], chosen_ref_logprob=-3.0, rejected_ref_logprob=-4.0)
    pairs[2] = replace(pairs[2], chosen_ref_logprob=-5.0)
    done = counted.score(pairs, ReferenceCache(tmp_path))
    assert counted.pairs_scored == 3
    expected = one_by_one(tiny.model(0, torch.float64), pairs)
    expected[1], expected[2, 0] = torch.tensor([-3.0, -4.0]), -5.0
    torch.testing.assert_close(values(done), expected, rtol=0, atol=1e-10)
    assert counted.score(done, None) == done and counted.score([], None) == [] and counted.pairs_scored == 3


def test_a_pair_given_twice_is_scored_once(tmp_path: Path) -> None:
    counted = Counted()
    done = counted.score([*make_pairs(3), *make_pairs(3)], ReferenceCache(tmp_path))
    assert counted.pairs_scored == 3 and torch.equal(values(done[:3]), values(done[3:]))


def test_a_pair_of_which_one_reply_is_known_is_scored_and_the_known_number_stays(tmp_path: Path) -> None:
    cache, (pair, *_) = ReferenceCache(tmp_path), make_pairs()
    counted = Counted()
    cache.put(
        [ReferenceCache.key(reference_cache._scorer(counted.model), *pair_ids(TOKENIZER, pair, "chosen"))],
        [-1.0],
    )
    (done,) = counted.score([pair], cache)
    assert counted.pairs_scored == 1 and done.chosen_ref_logprob == -1.0
    assert done.rejected_ref_logprob == pytest.approx(
        one_by_one(counted.model, [pair])[0, 1].item(), abs=1e-10
    )


def test_batches_go_from_long_to_short(tmp_path: Path) -> None:
    counted = Counted()
    counted.score(make_pairs(), ReferenceCache(tmp_path), batch_size=2)
    widths = [width for _, width in counted.batches]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_own_mode_back(tmp_path: Path, fails: bool) -> None:
    counted = Counted(fail_at=0 if fails else -1)
    counted.model.train()
    counted.model.model.norm.eval()
    before = [module.training for module in counted.model.modules()]
    try:
        counted.score(make_pairs(2), ReferenceCache(tmp_path))
    except KeyboardInterrupt:
        assert fails
    assert [module.training for module in counted.model.modules()] == before and {True, False} == set(before)


def test_a_broken_reference_is_named_and_not_kept(tmp_path: Path) -> None:
    counted = Counted()
    counted.model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="chosen reply of pair 's[01]' log-probability nan"):
        counted.score(make_pairs(2), ReferenceCache(tmp_path))
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        Counted().score(make_pairs(1), None, batch_size=0)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="were not saved"):
        done = Counted().score(make_pairs(2), ReferenceCache(tmp_path / "file" / "references"))
    assert values(done).isfinite().all()


# --- another reference -----------------------------------------------------------------------------


def known(model: nn.Module, folder: Path) -> bool:
    key = ReferenceCache.key(reference_cache._scorer(model), *pair_ids(TOKENIZER, make_pairs(1)[0], "chosen"))
    return ReferenceCache(folder).get([key]) != [None]


def test_another_models_fingerprint_misses(tmp_path: Path) -> None:
    counted, other = Counted(), Counted(seed=1)
    cache = ReferenceCache(tmp_path)
    mine, theirs = (values(c.score(make_pairs(2), cache)) for c in (counted, other))
    assert other.pairs_scored == 2 and not torch.allclose(mine, theirs)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    counted.model.model.norm.weight.data[3] += 1e-6
    counted.score(make_pairs(2), cache)
    assert counted.pairs_scored == 4


def test_the_same_weights_under_another_configuration_or_autocast_miss(tmp_path: Path) -> None:
    model = tiny.model()
    cached_reference_logprobs(model, make_pairs(1), COLLATOR, cache=ReferenceCache(tmp_path), progress=False)
    assert known(model, tmp_path) and known(tiny.model(), tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert not known(model, tmp_path)
    model.config.use_cache = False  # changes no number
    assert known(model, tmp_path)
    model.config.rms_norm_eps = 1e-3
    assert not known(model, tmp_path)


def test_adapters_switched_off_are_another_reference(tmp_path: Path) -> None:
    model = get_peft_model(tiny.model(), LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    cached_reference_logprobs(model, make_pairs(1), COLLATOR, cache=ReferenceCache(tmp_path), progress=False)
    assert known(model, tmp_path)
    with model.disable_adapter():
        assert not known(model, tmp_path)
    assert known(model, tmp_path)


# --- interruptions ---------------------------------------------------------------------------------


def test_an_interrupted_run_resumes_with_the_rest(tmp_path: Path) -> None:
    broken, counted = Counted(fail_at=2), Counted()
    with pytest.raises(KeyboardInterrupt):
        broken.score(make_pairs(), ReferenceCache(tmp_path), batch_size=2)
    done = counted.score(make_pairs(), ReferenceCache(tmp_path), batch_size=2)
    assert broken.pairs_scored == 4 and counted.pairs_scored == 3
    torch.testing.assert_close(values(done), one_by_one(counted.model, make_pairs()), rtol=0, atol=1e-10)


KILLED = """
import os, signal, sys
from test_reference_cache import Counted, make_pairs, reference_cache
reference_cache._FLUSH_SECONDS = 0.0
counted = Counted()
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL) if len(counted.batches) == 3 else None
counted.model.model.register_forward_pre_hook(kill)
counted.score(make_pairs(), reference_cache.ReferenceCache(sys.argv[1]), batch_size=2)
"""


def test_a_killed_process_leaves_what_it_had_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -9, done.stderr
    counted = Counted()
    counted.score(make_pairs(), ReferenceCache(tmp_path), batch_size=2)
    assert counted.pairs_scored == 3
    assert not list(tmp_path.glob("*.tmp"))


def write_many(folder: Path, writer: int) -> None:
    cache = ReferenceCache(folder)
    for i in range(20):
        cache.put([ReferenceCache.key("m", [writer], [i])], [-1.0 - writer - i / 100])
        cache.flush()


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(tmp_path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    keys = [ReferenceCache.key("m", [writer], [i]) for writer in range(4) for i in range(20)]
    assert ReferenceCache(tmp_path).get(keys) == [
        -1.0 - writer - i / 100 for writer in range(4) for i in range(20)
    ]


def test_what_is_on_disk_stays(tmp_path: Path) -> None:
    first, second = ReferenceCache(tmp_path), ReferenceCache(tmp_path)
    key = ReferenceCache.key("m", [1], [2])
    second.get([key])  # reads the folder before the first one writes
    for cache, value in ((first, -1.0), (second, -2.0)):
        cache.put([key], [value])
        cache.flush()
    assert second.get([key]) == ReferenceCache(tmp_path).get([key]) == [-1.0]


# --- files -----------------------------------------------------------------------------------------

KEYS = [ReferenceCache.key("m", [1], [i]) for i in range(3)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cache = ReferenceCache(tmp_path)
    cache.put(KEYS, [-0.1, -200.25, -3e-9])
    cache.flush()
    return tmp_path / "m.safetensors"


def test_numbers_are_kept_in_float64(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        digests, logprobs = opened.get_tensor("digests"), opened.get_tensor("logprobs")
        assert opened.metadata()["model"] == "m"
    assert logprobs.dtype == torch.float64 and digests.dtype == torch.uint8 and digests.shape == (3, 32)
    assert sorted(logprobs.tolist()) == [-200.25, -0.1, -3e-9]
    assert ReferenceCache(file.parent).get(KEYS) == [-0.1, -200.25, -3e-9]


def rewrite(file: Path, resigned: bool = False, **changed: torch.Tensor) -> None:
    "Other tensors under the old metadata, or with a checksum that fits them."
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
    tensors = load_file(file) | changed
    if resigned:
        facts["checksum"] = reference_cache._checksum(file.stem, tensors["digests"], tensors["logprobs"])
    save_file(tensors, file, metadata=facts)


def swap_values(file: Path) -> None:
    rewrite(file, logprobs=load_file(file)["logprobs"].flip(0).contiguous())


def other_models_file(file: Path) -> None:
    cache = ReferenceCache(file.parent)
    cache.put([ReferenceCache.key("other", [1], [2])], [-1.0])
    cache.flush()
    (file.parent / "other.safetensors").replace(file)


def with_value(value: float) -> dict[str, torch.Tensor]:
    return {"logprobs": torch.tensor([-1.0, value, -2.0], dtype=torch.float64)}


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "empty": lambda file: file.write_bytes(b""),
    "no safetensors": lambda file: torch.save({"logprobs": torch.zeros(3)}, file),
    "float32": lambda file: rewrite(file, True, logprobs=load_file(file)["logprobs"].float()),
    "int8 digests": lambda file: rewrite(file, True, digests=load_file(file)["digests"].view(torch.int8)),
    "nan": lambda file: rewrite(file, True, **with_value(torch.nan)),
    "infinite": lambda file: rewrite(file, True, **with_value(-torch.inf)),
    "another value": lambda file: rewrite(file, **with_value(-1.5)),
    "swapped values": swap_values,
    "swapped digests": lambda file: rewrite(file, digests=load_file(file)["digests"].flip(0).contiguous()),
    "another model's": other_models_file,
    "fewer digests": lambda file: rewrite(file, True, digests=load_file(file)["digests"][:2].contiguous()),
    "shorter digests": lambda file: rewrite(
        file, True, digests=load_file(file)["digests"][:, :31].contiguous()
    ),
    "two dimensions": lambda file: rewrite(file, True, logprobs=load_file(file)["logprobs"].view(3, 1)),
    "foreign tensors": lambda file: save_file({"weight": torch.zeros(3)}, file),
    "no metadata": lambda file: save_file(load_file(file), file),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_set_aside_with_a_warning_that_names_it(file: Path, kind: str) -> None:
    DAMAGE[kind](file)
    content, cache = file.read_bytes(), ReferenceCache(file.parent)
    with pytest.warns(UserWarning, match=r"m\.safetensors is damaged: .* It is now m\.\w+\.damaged"):
        assert cache.get(KEYS) == [None] * 3
    (aside,) = file.parent.glob("*.damaged")
    assert aside.read_bytes() == content and not file.exists()
    cache.put(KEYS[:1], [-7.0])
    cache.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ReferenceCache(file.parent).get(KEYS) == [-7.0, None, None]


def test_damage_found_while_flushing_costs_nothing_that_is_in_memory(file: Path) -> None:
    cache = ReferenceCache(file.parent)
    cache.get(KEYS)
    swap_values(file)
    cache.put([ReferenceCache.key("m", [9], [9])], [-9.0])
    with pytest.warns(UserWarning, match="is damaged"):
        cache.flush()
    assert ReferenceCache(file.parent).get([*KEYS, ReferenceCache.key("m", [9], [9])]) == [
        -0.1,
        -200.25,
        -3e-9,
        -9.0,
    ]


def test_a_flush_that_fails_leaves_the_old_file_and_no_litter(file: Path, monkeypatch) -> None:
    cache, before = ReferenceCache(file.parent), file.read_bytes()
    cache.put([ReferenceCache.key("m", [9], [9])], [-9.0])
    with monkeypatch.context() as patched:
        patched.setattr(reference_cache.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            cache.flush()
    assert file.read_bytes() == before and not list(file.parent.glob(".*.tmp"))
    cache.flush()
    assert ReferenceCache(file.parent).get([ReferenceCache.key("m", [9], [9])]) == [-9.0]


# --- keys ------------------------------------------------------------------------------------------


def test_where_the_prompt_ends_is_part_of_the_key() -> None:
    key = ReferenceCache.key
    splits = {key("m", ids[:n], ids[n:]) for ids in ([1, 2, 3], [1, 2, 3, 0]) for n in range(len(ids) + 1)}
    assert len(splits) == 9 and key("m", [1], []) != key("m1", [], []) != key("m", [], [1])
    assert key("m", (1, 2), [3]) == key("m", [1, 2], torch.tensor([3])) == key("m", [1, 2], [3])


IDS = st.lists(st.integers(0, 3), max_size=4)


@settings(deadline=None)
@given(st.tuples(st.sampled_from(["m", "m0"]), IDS, IDS), st.tuples(st.sampled_from(["m", "m0"]), IDS, IDS))
def test_equal_keys_mean_equal_inputs(a: tuple, b: tuple) -> None:
    assert (ReferenceCache.key(*a) == ReferenceCache.key(*b)) == (a == b)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a-b", "x" * 65])
def test_a_fingerprint_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no model fingerprint"):
        ReferenceCache.key(name, [1], [2])


@pytest.mark.parametrize("key", ["", "m", "m-12", f"../m-{'0' * 64}", f"m-{'g' * 64}", f"m-{'0' * 64}\n"])
def test_a_key_from_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    cache = ReferenceCache(tmp_path)
    for refused in (lambda: cache.get([key]), lambda: cache.put([key], [-1.0])):
        with pytest.raises(ValueError, match="no key of this cache"):
            refused()


@pytest.mark.parametrize("bad", [[float("nan")], [float("-inf")], [], [-1.0, -2.0]])
def test_bad_values_are_refused_and_not_kept(tmp_path: Path, bad: list[float]) -> None:
    cache = ReferenceCache(tmp_path)
    with pytest.raises(ValueError, match="must be finite|values"):
        cache.put(KEYS[:1], bad)
    cache.flush()
    assert cache.get(KEYS[:1]) == [None] and list(tmp_path.glob("*.safetensors")) == []
