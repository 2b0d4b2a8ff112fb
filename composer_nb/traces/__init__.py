"""Agent traces: messages, turns and the states in which a decision was made."""

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
)

__all__ = [
    "Action",
    "Message",
    "ToolCall",
    "ToolFailure",
    "TraceState",
    "action_message",
    "action_text",
    "content_text",
    "load_states",
    "message_action",
    "parse_action",
    "record_state",
    "save_states",
    "state_record",
    "tool_call",
    "vendor_of",
]
