"""The open, executable book of agentic post-training: one loss with three channels, from numbered notebooks.

Names are looked up when they are first used, so that `import composer_nb` costs nothing and needs no torch:
`from composer_nb import compose_loss` imports `composer_nb.loss` and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .batch import ComposerDataCollator, DPOPair, Rollout, build_batch
    from .launch.hf_jobs import HFJobsExecutor
    from .launch.job import ServerlessExecutor
    from .launch.kubernetes import K8sExecutor
    from .launch.local import LocalProcessExecutor
    from .launch.modal import ModalExecutor
    from .launch.sagemaker import SageMakerExecutor
    from .diloco.manager import MockManager, ObjectStoreAllReduce, ObjectStoreManager
    from .diloco.outer_loop import make_diloco_outer_loop
    from .distillation.divergence import generalized_jsd_loss
    from .distillation.entropy_opd import entropy_aware_opd_loss, teacher_entropy
    from .distillation.taid import TAIDScheduler, taid_loss
    from .traces.claude_code import ClaudeCodeIngester
    from .loss import LossConfig, compose_loss
    from .models import load_model
    from .preference import simpo_loss
    from .replay.normalize import (
        DJNormalizer,
        NormalizedDPOPair,
        replay_and_normalize_trace,
        replay_and_normalize_trace_sync,
    )
    from .replay.pairs import extract_dpo_pairs
    from .replay.runner import replay_trace
    from .trainer import ComposerReplicationTrainer
    from .traces.state import Action, ToolCall, TraceState

# The one place that says where a public name lives; the imports above repeat it for type checkers, and a test compares.
_MODULES: dict[str, tuple[str, ...]] = {
    "batch": ("ComposerDataCollator", "DPOPair", "Rollout", "build_batch"),
    "launch.hf_jobs": ("HFJobsExecutor",),
    "launch.job": ("ServerlessExecutor",),
    "launch.kubernetes": ("K8sExecutor",),
    "launch.local": ("LocalProcessExecutor",),
    "launch.modal": ("ModalExecutor",),
    "launch.sagemaker": ("SageMakerExecutor",),
    "diloco.manager": ("MockManager", "ObjectStoreAllReduce", "ObjectStoreManager"),
    "diloco.outer_loop": ("make_diloco_outer_loop",),
    "distillation.divergence": ("generalized_jsd_loss",),
    "distillation.entropy_opd": ("entropy_aware_opd_loss", "teacher_entropy"),
    "distillation.taid": ("TAIDScheduler", "taid_loss"),
    "traces.claude_code": ("ClaudeCodeIngester",),
    "loss": ("LossConfig", "compose_loss"),
    "models": ("load_model",),
    "preference": ("simpo_loss",),
    "replay.normalize": (
        "DJNormalizer",
        "NormalizedDPOPair",
        "replay_and_normalize_trace",
        "replay_and_normalize_trace_sync",
    ),
    "replay.pairs": ("extract_dpo_pairs",),
    "replay.runner": ("replay_trace",),
    "trainer": ("ComposerReplicationTrainer",),
    "traces.state": ("Action", "ToolCall", "TraceState"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
