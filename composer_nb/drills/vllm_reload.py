"""A tied head after new weights: `python -m composer_nb.drills.vllm_reload FOLDER` in vLLM's environment.

One model in this process, with vLLM's reload as it is and with the heads packed again. Writes `reload.json`:
the largest difference (nats) to transformers' log-probs of a text before, after the one and after the other.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from composer_nb.adapters import vllm_weights
from composer_nb.core import token_logprobs

TEXT = list(range(3, 90, 3))


def small_model(folder: Path) -> None:
    "Two random layers whose head is their embedding, large enough for vLLM's kernels."
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=True, **sizes))
    made.save_pretrained(folder)


def furthest(there: Any, model: Any) -> float:
    "Largest difference of the text's log-probs."
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    said = there.generate({"prompt_token_ids": TEXT}, asked, use_tqdm=False)[0].prompt_logprobs[1:]
    given = torch.tensor([next(iter(entry.values())).logprob for entry in said])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TEXT])).logits[:, :-1]
    return (token_logprobs(logits, torch.tensor([TEXT[1:]]))[0] - given).abs().max().item()


def hand_over(there: Any, model: Any, folder: Path, version: str, but: str = "") -> None:
    "All weights of `model`, moved; without the one whose name has `but` in it."
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.2)
    named = [(name, value) for name, value in model.named_parameters() if not but or but not in name]
    told = vllm_weights.leave_weights(folder, named, version)
    there.start_weight_update()
    there.update_weights({"update_info": vars(told)})
    there.finish_weight_update()
    there.reset_prefix_cache()


def main(folder: Path) -> None:
    "Measure and write."
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    small_model(folder / "small")
    there = LLM(
        str(folder / "small"), dtype="float32", max_model_len=128, max_num_seqs=2, enforce_eager=True,
        gpu_memory_utilization=0.2,
        skip_tokenizer_init=True, weight_transfer_config={"backend": vllm_weights.BACKEND},
    )  # fmt: skip
    there.init_weight_transfer_engine({"init_info": {"folder": str(folder)}})
    model = AutoModelForCausalLM.from_pretrained(folder / "small").eval()
    told = {"as it came": furthest(there, model)}
    packing, vllm_weights.pack_heads = vllm_weights.pack_heads, lambda model: 0
    hand_over(there, model, folder, "left")
    told["heads left as they are"] = furthest(there, model)
    vllm_weights.pack_heads = packing
    hand_over(there, model, folder, "packed")
    told["heads packed again"] = furthest(there, model)
    for what in ("refused", "afterwards"):
        try:
            hand_over(there, model, folder, what, "layers.1.self_attn.v_proj" if what == "refused" else "")
        except Exception as error:
            told[what] = str(error)
    (folder / "reload.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
