"""PRIME-RL's worker of vLLM, which loads weights from a folder, on a vLLM five releases younger than its pin.

With `COMPOSER_HEADS=stale` its update is left as it is: on a CPU a head that shares the embedding's weights then
goes on with the ones it was packed with at the start.
"""

import os

from vllm.model_executor.layers.logits_processor import LogitsProcessor

_own = LogitsProcessor._get_logits

from prime_rl.inference.vllm.worker.filesystem import FileSystemWeightUpdateWorker  # noqa: E402

LogitsProcessor._get_logits = _own  # theirs lacks an argument, and acts with `fp32_lm_head` alone


class Worker(FileSystemWeightUpdateWorker):
    "Theirs, and the head packed anew behind it."

    def update_weights_from_path(self, weight_path: str) -> None:
        from composer_nb.adapters.vllm_weights import pack_heads

        super().update_weights_from_path(weight_path)
        if os.environ.get("COMPOSER_HEADS") != "stale":
            pack_heads(self.model_runner.model)
