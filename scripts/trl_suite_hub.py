"""Folders that stand for the model hub while TRL's tests run: tiny random models and two small datasets
under the ids that the tests ask for.

With such a folder as working directory, `from_pretrained("trl-internal-testing/...")` and
`load_dataset("trl-internal-testing/zen", ...)` find local folders, and nothing is downloaded.
"""

import codecs
import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset
from torch import nn

from composer_nb.models import prepare_smollm2

OWNER = "trl-internal-testing"
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}

# Some tests replace `generate` by ids of Qwen's vocabulary and read back the text that these stand for.
SPECIAL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
MARKS = {
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}
QWEN_SIZE, SMALL = 151669, 16384
PIECES = {
    0: "!", 11: ",", 16: "1", 17: "2", 18: "3", 19: "4", 25: ":", 27: "<", 29: ">", 40: "I", 64: "a",
    65: "b", 66: "c", 198: "\n", 220: " ", 293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out",
    450: "de", 497: '",', 522: "</", 606: "name", 788: '":', 894: " any", 927: "sh", 944: "'t",
    1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool",
    6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement", 14172: "tool",
    16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment",
    64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip

# How many words of each line of `import this` make a prompt.
WORDS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 5, 9, 3, 6, 8, 8, 3)
TEST_ROWS = 2

REMOTE_CONFIG = """from transformers import LlamaConfig


class RemoteConfig(LlamaConfig):
    model_type = "remote"
"""
REMOTE_MODEL = """from transformers import LlamaForCausalLM

from .configuration_remote import RemoteConfig


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def zen() -> list[str]:
    """The aphorisms that Python prints on `import this`."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13").strip().split("\n")[2:]


def prompts() -> list[str]:
    """The beginnings of those lines, in their order."""
    return [" ".join(line.split()[:count]).rstrip(".") for line, count in zip(zen(), WORDS, strict=True)]


def write_readme(folder: Path, names: Sequence[str]) -> None:
    """Tells `load_dataset` which file holds which split of which configuration."""
    lines = ["---", "configs:"]
    for name in names:
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            lines += [f"  - split: {split}", f"    path: {name}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_dataset(folder: Path) -> None:
    """Rows of the configurations `standard_prompt_only` and `conversational_prompt_only`, as parquet."""
    starts = prompts()
    asked = [[{"role": "user", "content": f"How does this line end: {start} ...?"}] for start in starts]
    configurations = {"standard_prompt_only": starts, "conversational_prompt_only": asked}
    for name, rows in configurations.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:-TEST_ROWS]), ("test", rows[-TEST_ROWS:])):
            Dataset.from_dict({"prompt": part}).to_parquet(folder / name / f"{split}.parquet")
    write_readme(folder, list(configurations))


def byte_level(text: str) -> str:
    """How a byte-level vocabulary spells ASCII text."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def qwen_numbered(vocabulary: dict[str, int]) -> dict[str, int]:
    """The vocabulary with Qwen's ids for the pieces above; every other id up to Qwen's size means
    something.
    """
    fixed = {byte_level(text): i for i, text in PIECES.items()} | {
        text: i for i, text in (SPECIAL | MARKS).items()
    }
    taken = set(fixed.values())
    free = (i for i in range(QWEN_SIZE) if i not in taken)
    moved = {
        token: next(free) for token in sorted(vocabulary, key=vocabulary.__getitem__) if token not in fixed
    }
    return fixed | moved | {f"Ġt{i}_": i for i in free}


def small(found: dict[str, Any]) -> dict[str, Any]:
    """A byte-pair tokenizer that stopped learning early: the tests spend their time on logits."""
    vocabulary = {token: i for token, i in found["model"]["vocab"].items() if i < SMALL}
    merges = [pair for pair in found["model"]["merges"] if "".join(pair) in vocabulary]
    return found | {"model": found["model"] | {"vocab": vocabulary, "merges": merges}}


def with_qwen_ids(found: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer under Qwen's ids."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    marks = [
        {"id": i, "content": text, **plain, "special": i in SPECIAL} for i, text in (SPECIAL | MARKS).items()
    ]
    vocabulary = qwen_numbered(found["model"]["vocab"])
    return found | {"model": found["model"] | {"vocab": vocabulary}, "added_tokens": marks}


def tokenizers(found: dict[str, Any], folder: Path) -> dict[str, tf.PreTrainedTokenizerBase]:
    """One for each chat template: SmolLM2's own, and the two of Qwen's that TRL can parse."""
    from trl.chat_template_utils import qwen2_5_chat_template, qwen3_chat_template

    file = folder / "tokenizer.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    own = (prepare_smollm2() / "chat_template.jinja").read_text()
    templates = {"smollm2": own, "qwen2.5": qwen2_5_chat_template, "qwen3": qwen3_chat_template}
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "padding_side": "left"}
    return {
        name: tf.PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template, **marks)
        for name, template in templates.items()
    }


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every matrix by its fan-in, embeddings small, so that no gradient vanishes; bf16, as on the hub."""
    torch.manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = 2500 if id(parameter) in embeddings else parameter.shape[-1]
                parameter.normal_(std=fan_in**-0.5)
    return model.to(torch.bfloat16)


def model_of(kind: str, size: int, **options: Any) -> nn.Module:
    """A model of a class of transformers, whose configuration is that of its family."""
    family = kind.split("For")[0]
    config = getattr(tf, f"{family}Config")(vocab_size=size, **(SIZES | options))
    return randomise(getattr(tf, kind)(config))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "norm_topk_prob": True}
GLM = {
    "moe_intermediate_size": 32,
    "head_dim": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "use_qk_norm": True,
}
NEMOTRON = {
    "hidden_size": 16,
    "layers_block_type": ["mamba", "attention", "moe"],
    "num_hidden_layers": 3,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "use_mamba_kernels": False,
}
# id without owner: class, tokenizer, options
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", "smollm2", {"logit_scale": 1.0}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", "smollm2", {"head_dim": 8}),
    "tiny-Glm4MoeForCausalLM": ("Glm4MoeForCausalLM", "smollm2", GLM),
    "tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "smollm2",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-NemotronHForCausalLM-nano": ("NemotronHForCausalLM", "smollm2", NEMOTRON),
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", "qwen2.5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 8}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", "qwen3", EXPERTS),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", "smollm2", {}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", "smollm2", {"head_dim": 8}),
    "tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        "smollm2",
        {"num_labels": 1},
    ),
    "tiny-Qwen2ForSequenceClassification-2.5": (
        "Qwen2ForSequenceClassification",
        "qwen2.5",
        {"num_labels": 1},
    ),
    "tiny-Qwen3ForSequenceClassification": (
        "Qwen3ForSequenceClassification",
        "qwen3",
        {"num_labels": 1, "head_dim": 8},
    ),
}


def token_ids(tokenizer: tf.PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def write_model(folder: Path, name: str, tokenizer: tf.PreTrainedTokenizerBase) -> None:
    """One of `MODELS`, with its tokenizer."""
    kind, _, options = MODELS[name]
    model = model_of(kind, len(tokenizer), **options, **token_ids(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_remote(folder: Path, tokenizer: tf.PreTrainedTokenizerBase) -> None:
    """A Llama whose class is in files beside its weights."""
    model = model_of("LlamaForCausalLM", len(tokenizer), **token_ids(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "configuration_remote.py").write_text(REMOTE_CONFIG)
    (folder / "modeling_remote.py").write_text(REMOTE_MODEL)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_remote.RemoteConfig"}
    classes["AutoModelForCausalLM"] = "modeling_remote.RemoteForCausalLM"
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_hub(hub: Path, found: dict[str, Any]) -> None:
    """Every model above under the given tokenizer, and the dataset of texts."""
    owner, written = hub / OWNER, tokenizers(found, hub / "tokenizer")
    write_dataset(owner / "zen")
    for name, (_, tokenizer, _) in MODELS.items():
        write_model(owner / name, name, written[tokenizer])
    write_remote(owner / "tiny-RemoteForCausalLM", written["smollm2"])


def write_hubs(folder: Path) -> None:
    """`small` for most cases; `qwen` for those that write ids of Qwen's vocabulary down."""
    found = json.loads((prepare_smollm2() / "tokenizer.json").read_text())
    write_hub(folder / "small", small(found))
    write_hub(folder / "qwen", with_qwen_ids(found))
