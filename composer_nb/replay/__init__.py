"""Trace replay: teachers act in the states of a recorded trace, and where they agree a preference pair is made.

Kept by hand. A name is imported when it is first used, so that no part loads what another one needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "protocol": "OutOfCredit Teacher TeacherReply TeacherRequest TeacherStop teacher_messages",
    "prices": "DEFAULT_TEACHERS Price Prices prompt_token_bound",
    "received": "Attempt",
    "endpoints": "Endpoint Limits TokenBucket retry_after_s",
    "http_teacher": "HTTPTeacher OPENROUTER RequestSettings same_model",
    "local_teacher": "LocalTeacher shows_tools tools_as_text",
    "budget": "Budget",
    "ledger": "Ledger LedgerInUse NotRecorded",
    "actions": "canonical_action same_action speller",
    "gate": "AskAll Decision Gate Miss VOIGate drop_vendor",
    "account": "Estimate Replay",
    "asking": "ledgered_reply",
    "batch": "Sent send_batch",
    "batch_collect": "Collected collect_batch",
    "runner": "ReplayOptions replay_trace replay_trace_sync",
    "consensus": "Consensus EmbeddingJudge LLMJudge TextJudge exact hidden_state_embedder",
    "export": "student_messages",
    "pairs": "PairReport consensus_table extract_dpo_pairs",
    "normalize": "DEFAULT_RECIPE DJNormalizer NEAR_DUPLICATE_RECIPE NormalizedDPOPair "
    "TOOL_CALL_RECIPE replay_and_normalize_trace replay_and_normalize_trace_sync",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)

if TYPE_CHECKING:
    from composer_nb.replay.account import Estimate, Replay
    from composer_nb.replay.actions import canonical_action, same_action, speller
    from composer_nb.replay.asking import ledgered_reply
    from composer_nb.replay.batch import Sent, send_batch
    from composer_nb.replay.batch_collect import Collected, collect_batch
    from composer_nb.replay.budget import Budget
    from composer_nb.replay.consensus import (
        Consensus,
        EmbeddingJudge,
        LLMJudge,
        TextJudge,
        exact,
        hidden_state_embedder,
    )
    from composer_nb.replay.endpoints import Endpoint, Limits, TokenBucket, retry_after_s
    from composer_nb.replay.export import student_messages
    from composer_nb.replay.gate import AskAll, Decision, Gate, Miss, VOIGate, drop_vendor
    from composer_nb.replay.http_teacher import OPENROUTER, HTTPTeacher, RequestSettings, same_model
    from composer_nb.replay.ledger import Ledger, LedgerInUse, NotRecorded
    from composer_nb.replay.local_teacher import LocalTeacher, shows_tools, tools_as_text
    from composer_nb.replay.normalize import (
        DEFAULT_RECIPE,
        NEAR_DUPLICATE_RECIPE,
        TOOL_CALL_RECIPE,
        DJNormalizer,
        NormalizedDPOPair,
        replay_and_normalize_trace,
        replay_and_normalize_trace_sync,
    )
    from composer_nb.replay.pairs import PairReport, consensus_table, extract_dpo_pairs
    from composer_nb.replay.prices import DEFAULT_TEACHERS, Price, Prices, prompt_token_bound
    from composer_nb.replay.received import Attempt
    from composer_nb.replay.protocol import (
        OutOfCredit,
        Teacher,
        TeacherReply,
        TeacherRequest,
        TeacherStop,
        teacher_messages,
    )
    from composer_nb.replay.runner import ReplayOptions, replay_trace, replay_trace_sync


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"composer_nb.replay.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
