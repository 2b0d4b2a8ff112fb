"""Small random models, a tokenizer of the fewest words, and batches that the tests share."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from composer_nb.models import prepare_smollm2

WORDS = 4096  # of the bundled model's 49,152: a softmax over all of them is most of a tiny model's work
WHOLE = 49152


@functools.cache
def _few_words() -> Path:
    """The bundled model's tokenizer with its first ids alone: the same bytes, special tokens and template."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_tokenizer_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    whole = prepare_smollm2()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(whole / name, folder)
    content = json.loads((whole / "tokenizer.json").read_text(encoding="utf-8"))
    words, merges = content["model"]["vocab"], content["model"]["merges"]
    content["model"]["merges"] = merges[: len(merges) - (len(words) - WORDS)]  # each merge makes the next id
    content["model"]["vocab"] = {word: i for word, i in words.items() if i < WORDS}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def tokenizer(whole: bool = False) -> PreTrainedTokenizerBase:
    """The bundled model's tokenizer with its real chat template, and `WORDS` of its ids unless `whole`."""
    return AutoTokenizer.from_pretrained(prepare_smollm2() if whole else _few_words())


def model(
    seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
) -> LlamaForCausalLM:
    """A two-layer random Llama over `vocab_size` words, those of `tokenizer()` if not said."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS if vocab_size is None else vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def saved_model(folder: str | Path, seed: int = 0) -> LlamaForCausalLM:
    """The same from a folder, where a trainer finds it again for its reference."""
    model(seed).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval()
