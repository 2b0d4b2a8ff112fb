"""Agent traces: messages, turns and the states in which a decision was made; one module per log format."""

from composer_nb.traces.anthropic import AnthropicIngester
from composer_nb.traces.atif import ATIFIngester
from composer_nb.traces.claude_code import ClaudeCodeIngester
from composer_nb.traces.codex import CodexIngester
from composer_nb.traces.claude_stream import ClaudeStreamIngester
from composer_nb.traces.gemini import GeminiIngester
from composer_nb.traces.responses import ResponsesIngester
from composer_nb.traces.mini_swe_agent import MiniSWEAgentIngester
from composer_nb.traces.swe_agent import SWEAgentIngester
from composer_nb.traces.openhands import OpenHandsIngester
from composer_nb.traces.sharegpt import ShareGPTIngester
from composer_nb.traces.ingester import (
    INGESTERS,
    FileIngester,
    Format,
    Ingester,
    file_format,
    ingest,
    log_files,
    record_format,
)
from composer_nb.traces.contexts import ContextError, ContextReport, Mend, mend_context
from composer_nb.traces.lines import IngestReport, Problem, Source, decode_line
from composer_nb.traces.openai_chat import ChatIngester
from composer_nb.traces.pair import DPOPair
from composer_nb.traces.prefix import Prefix
from composer_nb.traces.state import (
    Action,
    Message,
    ToolCall,
    ToolFailure,
    TraceState,
    action_message,
    action_text,
    content_text,
    load_states,
    message_action,
    parse_action,
    record_state,
    save_states,
    state_record,
    tool_call,
    vendor_of,
    without_thought,
)
from composer_nb.traces.result_text import failure_in, with_result_failures
from composer_nb.traces.tools import builtin_tools, misfits, with_tools

__all__ = [
    "ShareGPTIngester",
    "OpenHandsIngester",
    "SWEAgentIngester",
    "MiniSWEAgentIngester",
    "ResponsesIngester",
    "GeminiIngester",
    "ClaudeStreamIngester",
    "INGESTERS",
    "ATIFIngester",
    "Action",
    "AnthropicIngester",
    "ChatIngester",
    "ClaudeCodeIngester",
    "ContextError",
    "ContextReport",
    "Mend",
    "mend_context",
    "CodexIngester",
    "DPOPair",
    "FileIngester",
    "Format",
    "IngestReport",
    "Ingester",
    "Message",
    "Prefix",
    "Problem",
    "Source",
    "ToolCall",
    "ToolFailure",
    "TraceState",
    "action_message",
    "action_text",
    "builtin_tools",
    "content_text",
    "decode_line",
    "failure_in",
    "file_format",
    "ingest",
    "load_states",
    "log_files",
    "message_action",
    "misfits",
    "parse_action",
    "record_format",
    "record_state",
    "save_states",
    "state_record",
    "tool_call",
    "vendor_of",
    "with_result_failures",
    "with_tools",
    "without_thought",
]
