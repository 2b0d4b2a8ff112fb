"""The trainer's earlier place; it and its parts live in `composer_nb.training`."""

from ..training.checkpoint import last_checkpoint
from ..training.config import ComposerConfig
from ..training.feedback import Feedback, FeedbackFunc
from ..training.presets import COMPOSER2_GRPO, with_length_penalty
from ..training.seams import TRL_ATTRIBUTES, TRL_SEAMS, moved_seams
from ..training.trainer import ComposerReplicationTrainer

__all__ = [
    "COMPOSER2_GRPO",
    "TRL_ATTRIBUTES",
    "TRL_SEAMS",
    "ComposerConfig",
    "ComposerReplicationTrainer",
    "Feedback",
    "FeedbackFunc",
    "last_checkpoint",
    "moved_seams",
    "with_length_penalty",
]
