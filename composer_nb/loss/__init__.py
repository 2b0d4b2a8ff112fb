"""The loss of three channels: its options, one function for each channel, and their sum."""

from .channels import (
    Channel,
    distillation_channel,
    distillation_count,
    head_of,
    hint_channel,
    pair_logprobs,
    policy_channel,
    preference_channel,
    reference_logprobs,
    row_weights,
    streamed_distillation,
    teacher_views,
)
from .compose import (
    LossComponents,
    channel_gradient_norms,
    channel_gradients,
    compose_channels,
    compose_loss,
    gradient_norm,
)
from .config import (
    PRESETS,
    RETIRED,
    HintOptions,
    LossConfig,
    PolicyTermOptions,
    PreferenceOptions,
)

__all__ = [
    "PRESETS",
    "RETIRED",
    "Channel",
    "HintOptions",
    "LossComponents",
    "LossConfig",
    "PolicyTermOptions",
    "PreferenceOptions",
    "channel_gradient_norms",
    "channel_gradients",
    "compose_channels",
    "compose_loss",
    "distillation_channel",
    "distillation_count",
    "gradient_norm",
    "head_of",
    "hint_channel",
    "pair_logprobs",
    "policy_channel",
    "preference_channel",
    "reference_logprobs",
    "row_weights",
    "streamed_distillation",
    "teacher_views",
]
