"""Small random models and batches that the tests share."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from composer_nb.models import prepare_smollm2


def tokenizer() -> PreTrainedTokenizerBase:
    """The bundled model's tokenizer, with its real chat template."""
    return AutoTokenizer.from_pretrained(prepare_smollm2())


def model(seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = 49152) -> LlamaForCausalLM:
    """A two-layer random Llama over the bundled model's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
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
