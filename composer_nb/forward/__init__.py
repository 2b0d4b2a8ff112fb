"""Hidden states once, prefixes shared, logits only where they count."""

from composer_nb.forward.prefixes import (
    SharedEncoded,
    SharedForwardPass,
    can_continue,
    continuations,
    continued_forward_pass,
    encode_continuations,
    prefix_shortcut,
    run_from_prefix,
)
from composer_nb.forward.sharing import (
    MIN_SAVING,
    SharedPrefixes,
    encode_shared,
    shared_forward_pass,
    shared_prefixes,
    two_levels,
)
from composer_nb.forward.states import (
    Encoded,
    ForwardPass,
    causal_lm,
    encode_sequences,
    eval_mode,
    forward_pass,
    grouped_heads,
    head_shortcut,
    project,
    run_body,
)

__all__ = [
    "MIN_SAVING",
    "Encoded",
    "ForwardPass",
    "SharedEncoded",
    "SharedForwardPass",
    "SharedPrefixes",
    "can_continue",
    "causal_lm",
    "continuations",
    "continued_forward_pass",
    "encode_continuations",
    "encode_sequences",
    "encode_shared",
    "eval_mode",
    "forward_pass",
    "grouped_heads",
    "head_shortcut",
    "prefix_shortcut",
    "project",
    "run_body",
    "run_from_prefix",
    "shared_forward_pass",
    "shared_prefixes",
    "two_levels",
]
