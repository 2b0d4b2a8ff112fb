"""Kinds of real error texts, templates that quote no value, a leak filter against planted values, judges,
and the way to a batch.
"""

import ast
import asyncio
import html
import json
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
import tiny
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from composer_nb import hints as hw
from composer_nb.batch import ComposerDataCollator, Rollout, align, assert_aligned
from composer_nb.hints import (
    HintContext,
    composite_hint,
    encode,
    insert_hint,
    raw_error_hint,
    render,
    template_hint,
)
from composer_nb.hints.leaks import _COMMON, _EMPTY
from composer_nb.models import complete, load_model
from composer_nb.replay.local_teacher import LocalTeacher
from composer_nb.replay.protocol import OutOfCredit, TeacherReply, TeacherRequest
from composer_nb.traces import Action, ToolCall, ToolFailure, TraceState, action_text, tool_call

TASK = [{"role": "user", "content": "Make the parser accept an empty file."}]
SCHEMA = {
    "type": "object",
    "required": ["path", "old"],
    "properties": {
        "path": {"type": "string"},
        "old": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "mode": {"type": "string", "enum": ["once", "all"]},
        "edits": {
            "type": "array",
            "items": {"type": "object", "required": ["at"], "properties": {"at": {"type": "number"}}},
        },
        "where": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
OPENAI = {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}
ANTHROPIC = {"name": "edit", "input_schema": SCHEMA}
BARE = {"name": "edit", "parameters": SCHEMA}
MCP = {"name": "edit", "inputSchema": SCHEMA}
GOOD = {"path": "a.py", "old": "x"}


def failed(
    call: ToolCall, message: str = "Something went wrong.", tools=(OPENAI,), kind: str = "tool_error"
) -> TraceState:
    return TraceState("s", TASK, Action(tool_calls=(call,)), tools, (ToolFailure(call, message, kind),))


def site_of(state: TraceState) -> hw.ErrorSite:
    (site,) = hw.error_sites([state], skip=())
    return site


# ---- kinds ----

TEXTS = [
    ("<tool_use_error>Error: No such tool available: Grep.</tool_use_error>", "unknown_tool"),
    ("MCP error -32602: Tool get_page not found", "unknown_tool"),
    ("Unknown tool: fetch", "unknown_tool"),
    ("MCP error -32602: Invalid arguments for tool search: expected string", "bad_arguments"),
    ("params must have required property 'new_string'", "bad_arguments"),
    (
        "<tool_use_error>InputValidationError: Ask failed due to the following issue:\n"
        "The parameter `q` type is expected as `array`",
        "bad_arguments",
    ),
    (
        "InputValidationError: Read was called with input that could not be parsed as JSON.\n"
        'You sent {"offset": 690, , }',
        "malformed_arguments",
    ),
    ("Failed to parse tool arguments: Expecting ',' delimiter", "malformed_arguments"),
    ("Failed to edit, 0 occurrences found for old_string in a.py. No edits made.", "edit_not_found"),
    ("No replacement was performed, old_str `x` did not appear verbatim in /a.py.", "edit_not_found"),
    ("error: patch failed: a.py:1\nerror: a.py: patch does not apply", "edit_not_found"),
    ("No replacement was performed. Multiple occurrences of old_str `x` in lines [1, 2].", "edit_not_unique"),
    ("Failed to edit, Expected 1 occurrence but found 3 for old_string", "edit_not_unique"),
    ("File has been modified since read, either by the user or by a linter.", "stale_file"),
    ("Command was automatically cancelled because it exceeded the timeout of 5.0 minutes", "timeout"),
    ("subprocess.TimeoutExpired: Command 'make' timed out after 3 seconds", "timeout"),
    ("test result: FAILED. 3 passed; 1 failed; 0 ignored", "test_failure"),
    ("Exit code 1\n--- FAIL: TestEmpty (0.00s)", "test_failure"),
    ("Tests:       1 failed, 2 passed, 3 total", "test_failure"),
    ("Exit code 1\n0 failed, 3 passed, no coverage", "nonzero_exit"),
    ("bash: -c: line 1: syntax error near unexpected token `('", "syntax_error"),
    ("Error: Cannot find module 'left-pad'", "module_not_found"),
    ("zsh: command not found: rg", "command_not_found"),
    ("'rg' is not recognized as an internal or external command", "command_not_found"),
    ("sh: 1: fd: not found", "command_not_found"),
    ("Claude requested permissions to write to /x, but you haven't granted it yet.", "permission_denied"),
    ("Permission to use Write has been auto-denied (prompts unavailable).", "permission_denied"),
    (
        "This Bash command contains multiple operations. The following parts require approval: mkdir",
        "permission_denied",
    ),
    ("IsADirectoryError: [Errno 21] Is a directory: 'src'", "not_a_file"),
    ("Directory does not exist: /x. Note: your current working directory is /y.", "file_not_found"),
    ("npm ERR! code ENOENT", "file_not_found"),
    ("curl: (7) Failed to connect to host port 1: Connection refused", "network"),
    ("The command returned non-zero exit status", "nonzero_exit"),
    ("Process exited with code -9", "nonzero_exit"),
    ("[Request interrupted by user for tool use]", "user_rejected"),
    ("The user doesn't want to take this action right now.", "user_rejected"),
    ("Agent terminated early due to an API error: You've hit your session limit", "cancelled"),
    ("This tool cannot read binary files.", "tool_error"),
    ("Exit code 0", "tool_error"),
    ("", "tool_error"),
]


@pytest.mark.parametrize("message, kind", TEXTS)
def test_the_words_of_real_tools_have_a_kind(message, kind):
    assert hw.error_kind(message) == kind
    assert hw.error_kind(message.upper()) == kind or kind == "test_failure"


def test_both_ends_of_a_long_log_are_read_and_its_middle_costs_nothing():
    filler = "x" * 5_000_000
    assert hw.error_kind(f"Permission denied\n{filler}") == "permission_denied"
    assert hw.error_kind(f"{filler}\nPermission denied") == "permission_denied"
    assert hw.error_kind(filler) == "tool_error"


def test_your_own_pattern_goes_first():
    before = list(hw.ERROR_PATTERNS)
    try:
        hw.add_error_pattern("quota", r"^no such tool$")
        assert (
            hw.error_kind("first\nNo such tool\nlast") == "quota"
            and hw.error_kind("no such tool: x") == "unknown_tool"
        )
        with pytest.raises(ValueError, match="does not compile"):
            hw.add_error_pattern("broken", "(")
        assert hw.ERROR_PATTERNS[1:] == before
    finally:
        hw.ERROR_PATTERNS[:] = before


# ---- structure ----


@pytest.mark.parametrize("tool", [OPENAI, ANTHROPIC, BARE, MCP])
def test_every_dressing_of_a_schema_reads_the_same(tool):
    assert hw.tool_schemas([tool, {"type": "web_search"}, None, {"name": 3}]) == {"edit": SCHEMA}
    site = site_of(failed(ToolCall("edit", {"path": "a.py"}), "ENOENT", (tool,)))
    assert (site.error_kind, site.problems) == ("bad_arguments", ('"old" is missing',))
    assert (
        site.available_tools == ("edit",) and site.tool_schema == SCHEMA and site.intent == TASK[0]["content"]
    )


@pytest.mark.parametrize(
    "extra, problems",
    [
        ({}, []),
        ({"old": None, "count": 2.0, "mode": "all", "edits": [{"at": 1}, {"at": 0.5}], "where": None}, []),
        ({"path": 7}, ['"path" must be string']),
        ({"count": True}, ['"count" must be integer']),
        ({"count": 2.5}, ['"count" must be integer']),
        ({"mode": "some"}, ['"mode" must be one of the values that its schema lists']),
        (
            {"edits": [{}, {"at": "x"}]},
            ['"at" is missing in an item of "edits"', '"at" in an item of "edits" must be number'],
        ),
        ({"where": "here"}, ['"where" must be integer or null']),
        ({"unlisted": 1}, []),
    ],
)
def test_arguments_are_held_against_the_schema(extra, problems):
    assert hw.argument_problems(GOOD | extra, SCHEMA) == problems
    assert hw.argument_problems(GOOD | extra, SCHEMA | {"additionalProperties": True}) == problems


def test_an_unlisted_argument_is_a_problem_where_the_schema_is_closed():
    problem = ['"unlisted" is no argument of it']
    assert hw.argument_problems(GOOD | {"unlisted": 1}, SCHEMA | {"additionalProperties": False}) == problem
    assert hw.argument_problems(GOOD | {"unlisted": 1}, SCHEMA, closed=True) == problem
    open_call = ToolCall("edit", GOOD | {"unlisted": 1})
    assert site_of(failed(open_call, "ENOENT: no such file")).error_kind == "file_not_found"
    assert site_of(failed(open_call, "failed")).problems == tuple(problem)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": None},
        {"type": "object"},
        {"properties": {"path": True}},
        {"properties": {"path": {"$ref": "#/x"}}},
    ],
)
def test_a_schema_that_says_nothing_finds_nothing(schema):
    assert hw.argument_problems(GOOD, schema) == []


@pytest.mark.parametrize(
    "text, problem",
    [
        ('{"path": ', "not JSON"),
        ("[1, 2]", "an array, not an object"),
        ('"x"', "a single value, not an object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_arguments_that_are_no_object_are_malformed(text, problem):
    site = site_of(failed(tool_call("edit", text), "whatever"))
    assert site.error_kind == "malformed_arguments" and problem in site.problems[0]
    assert "JSON object" in template_hint(site) and text not in template_hint(site)


def test_structure_goes_before_the_ingester_and_the_ingester_before_words():
    assert site_of(failed(ToolCall("grep", GOOD), "ENOENT", kind="timeout")).error_kind == "unknown_tool"
    assert site_of(failed(ToolCall("edit", {}), "ENOENT", kind="timeout")).error_kind == "bad_arguments"
    assert site_of(failed(ToolCall("edit", GOOD), "ENOENT", kind="timeout")).error_kind == "timeout"
    assert site_of(failed(ToolCall("edit", GOOD), "ENOENT")).error_kind == "file_not_found"
    assert site_of(failed(ToolCall("grep", GOOD), "ENOENT", tools=())).error_kind == "file_not_found"


def test_sites_come_in_order_and_a_no_or_a_failed_test_is_none():
    messages = [
        "ENOENT",
        "The user doesn't want to proceed",
        "1 failed, 2 passed",
        "Cancelled: parallel tool call",
        "EISDIR",
    ]
    calls = tuple(ToolCall("edit", GOOD, id=str(i)) for i in range(len(messages)))
    state = TraceState(
        "s", TASK, Action(tool_calls=calls), (OPENAI,), tuple(map(ToolFailure, calls, messages))
    )
    assert [s.call.id for s in hw.error_sites([state, TraceState("t", TASK, Action("done"))])] == ["0", "4"]
    assert [s.call.id for s in hw.error_sites([state], skip=())] == list("01234")
    with pytest.raises(ValueError, match="hint_context"):
        hw.ErrorSite("x").call  # noqa: B018


# ---- templates ----

RARE = st.text("qxzjkvwypq0123456789Ωßé", min_size=6, max_size=20)
KINDS = sorted({*hw.TEMPLATES, "unknown_tool", "bad_arguments", "malformed_arguments"})


def test_every_kind_that_is_a_mistake_has_a_template():
    kinds = {kind for kind, _ in hw.ERROR_PATTERNS}
    assert kinds - {"user_rejected", "cancelled"} == set(KINDS)
    for kind in KINDS:
        assert template_hint(HintContext(kind, "", ("edit",), "edit", SCHEMA)).startswith("Reminder: ")
    assert template_hint(HintContext("tool_error", "x", ("edit",), "edit", SCHEMA)) == ""


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from([*SCHEMA["properties"], "folder"]), RARE, min_size=1),
    st.booleans(),
)
def test_a_template_quotes_no_value_of_the_call_nor_of_the_error(kind, values, as_text):
    arguments = json.dumps(values)[:-1] if as_text else values
    message = f"failed on {list(values.values())}, expected zzqqzzqq"
    site = site_of(failed(ToolCall("edit", arguments), message, kind=kind))
    for context in (
        site,
        HintContext(kind, message, ("edit",), "edit", SCHEMA),
        HintContext(kind, message, ("edit",), "edit"),
    ):
        hint = template_hint(context)
        assert hint and "zzqqzzqq" not in hint
        assert not any(value in hint for value in values.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_no_call_and_has_nothing_to_fill_in(kind):
    hint = template_hint(HintContext(kind, "", ("edit", "read"), "edit", SCHEMA))
    assert hw.clean_hint(hint)[1] == "" and "{" not in hint
    assert not hw.leaked_values(hint, [1, 0, "yes", True, "a.py"])


def test_a_tool_name_with_braces_or_without_end_stays_a_name():
    hint = template_hint(HintContext("timeout", "", (), "{0} {tool}\n" + "x" * 500))
    assert len(hint) < 250 and "\n" not in hint


# ---- leaks ----


def spellings(value: str) -> list[str]:
    escaped = json.dumps(value)
    return [
        value, value.upper(), value.lower(), f"'{value}'", f"`{value}`", f"“{value}”", f"({value}).", escaped,
        json.dumps({"x": value}), json.dumps(escaped), json.dumps(value, ensure_ascii=False), quote(value),
        html.escape(value), value.replace(" ", "  \n"), "\u200b".join(value),
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in value),
    ]  # fmt: skip


WORDS = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789éüñßΩжщ東京 _-./", min_size=2, max_size=30
)


@settings(max_examples=300, deadline=None)
@given(
    WORDS,
    st.integers(0, 15),
    st.sampled_from(["", "Pass ", "It should be: "]),
    st.sampled_from(["", ".", " here, please."]),
)
@example("Bé", 0, "", "")
@example("東京", 0, "天気", "")
@example("C:\\new\\table", 7, "Use ", "")
@example("line one\nline two", 7, "Use ", "")
@example("IN", 0, "Set ", ".")
@example("++", 0, "Use ", ".")
def test_a_planted_string_is_found_in_every_spelling(value, which, before, after):
    letters = "".join(c for c in value if c.isalnum())
    assume(value == value.strip() and len(letters) >= 2 or value == "++")
    assume(value.lower() not in _COMMON | _EMPTY or value == "IN")
    assume(value != "IN" or which in (0, 1, 3))
    spelled = spellings(value)[which]
    assert hw.leaked_values(f"{before}{spelled}{after}", {"a": [{"b": value}]}) == [value]


@pytest.mark.parametrize("value, hint", [
    ("San Francisco", "use san_francisco"), ("San Francisco", "use SanFrancisco"),
    ("sanfrancisco", "use San Francisco"), ("5 km", "set 5km"), ("2023-10-01", "set 20231001"),
    ("5551234567", "call 555-123-4567"), ("São Paulo", "in Sao Paulo"),
    ("celsius", "mycelsiusunit"), ("Tom & Jerry", "use Tom &amp; Jerry"), ("été", "use &eacute;t&eacute;"),
    ("東京", "東京の天気"), ("x", "name it 'x'"), ("X", "name it X"), ("in", 'set "in"'),
    ("1000", "set 1,000"), ("/", "use '/'"),
    ("def f(a, b): return a + b", "write return a + b instead, def f(a, b) first"),
])  # fmt: skip
def test_other_spellings_are_found(value, hint):
    assert hw.leaked_values(hint, [value], ngram=3) == [value]


@pytest.mark.parametrize("value, hint", [
    ("in", "look in the folder"), ("a", "a tool"), ("cat", "concatenate"), ("x", "x marks it"),
    ("US", "tell us"), ("A", "A tool is needed"), (1, "use one of the tools"), (5, "utf5 in v1.5.2"),
    (3, "30 or 13 or 0.3"), ("5 km", "set 15 km"), (True, "true"), ("true", "true"), ("", "x"),
    (None, "null"), (float("nan"), "nan"), ("notable", "is not able"), ({"unit": None}, "unit"),
])  # fmt: skip
def test_what_gives_nothing_away_is_kept(value, hint):
    assert hw.leaked_values(hint, [value]) == []


ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(n: int) -> str:
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    big, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{in_words(n // big)} {name}" + (f" and {in_words(n % big)}" if n % big else "")


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 999_999), st.integers(0, 13), st.booleans())
def test_a_planted_number_is_found_in_every_spelling(n, which, negative):
    exact = f"{n:.6e}".replace("e+0", "e").replace("e+", "E+")
    spelled = [
        str(n), f"{n:,}", f"{n}.0", exact, f"{n:,}".replace(",", "_"), f"{n:,}".replace(",", " "),
        f"{n:,}".replace(",", "'"), f"{n:,}".replace(",", "."), f"{n * 100}%", in_words(n),
        in_words(n).upper(), f"${n}", f"'{n}'", f"{n}km",
    ][which]  # fmt: skip
    value = -n if negative else n
    for answer in (value, float(value), str(value), {"x": [{"y": value}]}, json.dumps({"x": value})):
        assert hw.leaked_values(f"The value is {spelled}.", answer), (answer, spelled)
    assert not hw.leaked_values(f"The value is {spelled}.", [n + 0.5])


@pytest.mark.parametrize(
    "value, hint",
    [
        (0.5, "50%"),
        (0.5, ".5"),
        (3.5, "3,5"),
        (0.1, "1e-1"),
        (1.5e6, "1.5 million"),
        (0, "0"),
        (10**30, "1e30"),
        (2000, "2k"),
    ],
)
def test_fractions_and_large_numbers_are_found(value, hint):
    assert hw.leaked_values(f"give {hint} here", value) == [value]


def test_a_number_beyond_reason_breaks_nothing():
    assert hw.leaked_values(
        "1e99999999999999999999 and " + "9" * 5000, [10**6000, float("inf"), "1e99999999999999999999"]
    ) == ["1e99999999999999999999"]


NAMES = st.lists(
    st.text("abcdefghilmnoprstu_", min_size=3, max_size=12).filter(lambda n: n.strip("_")),
    min_size=1,
    max_size=5,
    unique=True,
)


@settings(max_examples=150, deadline=None)
@given(
    NAMES,
    st.lists(
        st.one_of(st.text("wxyzqjkv", min_size=3, max_size=12), st.integers(2, 10**6), st.booleans()),
        min_size=1,
    ),
    st.sampled_from(KINDS),
)
def test_a_hint_of_names_types_and_error_text_is_kept(names, values, kind):
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names[:1],
    }
    context = HintContext(kind, "the call was not right", tuple(names), names[0], schema)
    assume(not any(str(v) in name for v in values for name in names))
    for writer in (template_hint, raw_error_hint):
        assert hw.leak_filter(writer, [*values, *names, "string"], strict=True)(context) == writer(context)


def test_runs_of_words_of_a_text_answer_leak_when_asked():
    answer = "First read the file, then replace the comma by a semicolon and run the tests."
    quoted = "You might replace the comma by a colon."
    assert hw.leaked_values(quoted, answer) == [answer]
    assert hw.leaked_values(quoted, answer, ngram=None) == hw.leaked_values(quoted, answer, ngram=6) == []
    with pytest.raises(ValueError, match="ngram is 0"):
        hw.leaked_values(quoted, answer, ngram=0)


def test_the_filter_refuses_records_raises_and_lets_through():
    site, report = site_of(failed(ToolCall("edit", GOOD), "expected 'b.py'")), hw.HintReport()
    refused = hw.leak_filter(raw_error_hint, {"path": ["b.py"]}, report=report, name="raw")
    assert refused(site) == "" and report.refused == {("raw", "holds a value of the answer"): 1}
    by_state = hw.leak_filter(raw_error_hint, lambda context: {"s": "b.py"}[context.state.state_id])
    assert by_state(site) == ""
    with pytest.raises(hw.HintLeak, match="b.py") as caught:
        hw.leak_filter(raw_error_hint, "b.py", strict=True)(site)
    assert caught.value.values == ["b.py"]
    assert hw.leak_filter(raw_error_hint, "b.py", allowed=["is it b.py?"], strict=True)(site)
    assert hw.leak_filter(raw_error_hint, "b.py", allowed=["is it c.py?"])(site) == ""
    assert hw.leak_filter(raw_error_hint, ["b.py", 7], allowed=lambda c: "B.PY")(site)
    assert (
        hw.leak_filter(raw_error_hint, None)(site)
        and hw.leak_filter(lambda c: "", "b.py", strict=True)(site) == ""
    )


def test_the_context_is_what_the_student_could_read():
    messages = [{"role": "user", "content": [{"type": "text", "text": "in Oslo"}]},
                {"role": "assistant", "content": None,
                 "tool_calls": [{"function": {"name": "edit", "arguments": '{"path": "été.py"}'}}]},
                {"role": "tool", "content": "forty lines"}]  # fmt: skip
    call = ToolCall("edit", {"path": "secret.py"})
    state = TraceState("s", messages, Action(tool_calls=(call,)), (OPENAI,), (ToolFailure(call, "ENOENT"),))
    text = hw.context_text(site_of(state))
    later = TraceState(
        "t",
        [*messages, {"role": "user", "content": "Go on."}],
        state.student_action,
        (OPENAI,),
        state.failures,
    )
    assert (site_of(state).intent, site_of(later).intent) == ("in Oslo", "Go on.")
    assert [
        len(hw.leaked_values(" ".join(text), value)) for value in ("Oslo", "été.py", 40, "once", "secret.py")
    ] == [1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="holds no state"):
        hw.context_text(hw.ErrorSite("x"))


# ---- reports and judges ----


def test_a_report_counts_who_wrote_and_who_did_not():
    report, site = hw.HintReport(), site_of(failed(ToolCall("edit", GOOD), "Something odd"))
    writer = composite_hint(report.watch("template", template_hint),
                            report.watch("judge", hw.judge_hint(lambda m: "NO HINT", report=report)),
                            report.watch("raw", raw_error_hint))  # fmt: skip
    assert writer(site) == "Something odd" and writer(site_of(failed(ToolCall("edit", {})))).startswith(
        "Reminder"
    )
    assert report.rows() == [
        {"writer": "template", "written": 1, "silent": 1, "refused": {}},
        {"writer": "judge", "written": 0, "silent": 1, "refused": {"declined": 1}},
        {"writer": "raw", "written": 1, "silent": 0, "refused": {}},
    ]


def test_a_clipped_hint_is_one_line_of_so_many_words():
    context = HintContext("x", "one two\n three four")
    assert hw.clipped(raw_error_hint, 4)(context) == "one two three four"
    assert hw.clipped(raw_error_hint, 3)(context) == "one two three …"
    assert len(hw.clipped(raw_error_hint, 3)(HintContext("x", "y" * 10_000))) < 40
    assert hw.clipped(raw_error_hint)(HintContext("x")) == ""
    with pytest.raises(ValueError, match="max_words is 0"):
        hw.clipped(raw_error_hint, 0)


@pytest.mark.parametrize("reply, hint, reason", [
    ('Hint: "Read the file\n\n first."', "Read the file first.", ""),
    ("**Reminder:** Read the file first.", "Read the file first.", ""),
    ("<think>a\nthought</think>\nRead it first.", "Read it first.", ""),
    ("Read it.\n```python\nopen('a')\n```", "Read it.", ""),
    ("The type is List[str] or a < b > c.", "The type is List[str] or a < b > c.", ""),
    ("", "", "empty"), ("```\nonly code\n```", "", "empty"), ("<think>never ends", "", "empty"),
    ('"" ', "", "empty"), ("NO HINT", "", "declined"), ("**No hint.** The call was fine.", "", "declined"),
    ("word " * 11, "", "repeats itself"), (" ".join(f"w{i}" for i in range(11)), "", "too long"),
    ("x" * 400, "", "too long"), ('{"name": "edit", "arguments": {}}', "", "spells a call"),
    ('Try <tool_call>{"name": "f"}', "", "spells a call"),
    ('Call edit with {"path": "a"}', "", "spells a call"),
    ("Call it with <file path>.", "", "leaves something to fill in"),
    ("Open {path} first.", "", "leaves something to fill in"),
    ("Open [your file] first.", "", "leaves something to fill in"),
])  # fmt: skip
def test_a_judges_reply_is_cleaned_or_refused(reply, hint, reason):
    limit = 12 if reason == "repeats itself" else 10
    assert hw.clean_hint(reply, limit) == (hint, reason)


def test_a_judge_reads_request_tools_call_and_error_and_its_silence_is_counted():
    asked, report = [], hw.HintReport()

    def ask(messages):
        asked.append(messages)
        return "Read the file before {editing} it."

    site = site_of(failed(ToolCall("edit", GOOD | {"path": "p" * 10_000}), "ENOENT " + "e" * 10_000))
    assert hw.judge_hint(ask, max_words=33, report=report)(site) == ""
    assert report.refused == {("judge", "leaves something to fill in"): 1}
    (system, user), text = asked[0], asked[0][1]["content"]
    assert [system["role"], user["role"]] == ["system", "user"] and "33 words" in system["content"]
    for part in (TASK[0]["content"], "count (integer)", "Call: edit", "Error: ENOENT"):
        assert part in text
    assert len(text) < 6000
    with pytest.raises(TypeError, match="hint_context"):
        hw.judge_hint(ask)(HintContext("x"))
    with pytest.raises(ValueError, match="max_words is 0"):
        hw.judge_hint(ask, max_words=0)


class EchoTeacher:
    """A teacher in process that answers with a rule; the request and reply types are the real ones."""

    name = model = "rule"
    usd = 0.0

    def __init__(
        self, text: str | None = "Mind the types.", error: Exception | None = None, wait_s: float = 0.0
    ) -> None:
        self.text, self.error, self.wait_s, self.requests = text, error, wait_s, []
        self.states: list[str] = []

    def request(self, state: TraceState) -> TeacherRequest:
        self.states.append(state.state_id)
        return TeacherRequest(self.name, self.model, tuple(state.messages), tuple(state.tools))

    def worst_case_usd(self, request: TeacherRequest) -> float:
        return self.usd

    async def reply(self, request: TeacherRequest) -> TeacherReply:
        self.requests.append(request)
        await asyncio.sleep(self.wait_s)
        if self.error:
            raise self.error
        skipped = self.text is None
        return TeacherReply(
            request.key, self.name, None if skipped else Action(self.text), "skipped" if skipped else "ok"
        )


def test_a_teacher_becomes_a_judge_also_where_a_loop_is_running():
    site, teacher = site_of(failed(ToolCall("edit", GOOD), "odd")), EchoTeacher()
    judge = hw.judge_hint(hw.ask_teacher(teacher))
    assert judge(site) == "Mind the types."

    async def in_a_notebook():
        return judge(site)

    assert asyncio.run(in_a_notebook()) == "Mind the types."
    first, second = teacher.requests
    assert len(set(teacher.states)) == 1 and teacher.states[0].startswith("hint/")
    assert (
        first.key == second.key and first.tools == () and first.messages[1]["content"].startswith("Request:")
    )
    assert hw.judge_hint(hw.ask_teacher(EchoTeacher(None)))(site) == ""


def test_what_a_teacher_raises_is_raised_and_its_budget_can_stand_between():
    site = site_of(failed(ToolCall("edit", GOOD), "odd"))
    with pytest.raises(OutOfCredit):
        hw.judge_hint(hw.ask_teacher(EchoTeacher(error=OutOfCredit("rule", 402, "empty"))))(site)
    with pytest.raises(TimeoutError):
        hw.judge_hint(hw.ask_teacher(EchoTeacher(wait_s=5), timeout_s=0.05))(site)
    teacher, paid = EchoTeacher(), []

    async def with_ledger(request):
        paid.append(request.key)
        return await teacher.reply(request)

    assert hw.judge_hint(hw.ask_teacher(teacher, reply=with_ledger))(site) == "Mind the types."
    assert paid == [teacher.requests[0].key]


@pytest.mark.model
def test_the_local_teacher_of_the_replay_is_a_judge():
    model, tok = load_model()
    ask = hw.ask_teacher(LocalTeacher(model, tok, name="smollm2", max_tokens=40))
    asked = [{"role": "user", "content": "What is 2+2? Answer in one short sentence."}]
    (expected,) = complete(model, tok, [asked], max_new_tokens=40)
    assert ask(asked) == expected.strip() != ""
    cut = hw.ask_teacher(LocalTeacher(model, tok, name="smollm2", max_tokens=2))
    assert cut(asked) == ""


# ---- to a batch ----


def test_one_turn_has_one_hint_with_each_text_once():
    calls = tuple(ToolCall("edit", GOOD, id=str(i)) for i in range(3))
    failures = tuple(map(ToolFailure, calls, ["ENOENT", "EISDIR", "ENOENT"]))
    state = TraceState("s", TASK, Action(tool_calls=calls), (OPENAI,), failures)
    quiet = [
        TraceState("t", TASK, Action("done")),
        failed(ToolCall("edit", GOOD), "1 failed, 2 passed"),
        failed(ToolCall("edit", GOOD), "odd"),
    ]
    ((found, hint),) = hw.hinted_states([*quiet, state], template_hint)
    assert found is state and len(hint.splitlines()) == 2 and "folder is no file" in hint
    assert [s.state_id for s, _ in hw.hinted_states(quiet, raw_error_hint, skip=())] == ["s", "s"]
    endless = (failed(ToolCall("edit", GOOD), "ENOENT") for _ in iter(int, 1))
    assert next(hw.hinted_states(endless, template_hint))[1]


@cache
def tokenizer():
    return tiny.tokenizer()


def rollout(state: TraceState, hint: str) -> Rollout:
    prompt = encode(tokenizer(), render(tokenizer(), state.messages))
    turn = (
        encode(tokenizer(), action_text(state.student_action))
        if state.student_ids is None
        else list(state.student_ids)
    )
    return Rollout(prompt + turn, [0] * len(prompt) + [1] * len(turn), hint=hint, site_context=state.messages)


@pytest.mark.model
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_hint_stands_above_the_failing_call_and_compared_tokens_are_equal(side):
    long = [*TASK, {"role": "assistant", "content": "Let me look."}, {"role": "tool", "content": "a.py b.py"}]
    states = [
        failed(ToolCall("edit", {"path": "c.py", "old": "x"}), "File does not exist."),
        failed(ToolCall("grep", {"q": "naïve 日本"}), "odd"),
    ]
    states += [TraceState("l", long, f.student_action, (OPENAI,), f.failures) for f in states]
    states += [
        TraceState(
            "i", long, states[0].student_action, (OPENAI,), states[0].failures, student_ids=(504, 504, 19, 7)
        )
    ]
    pairs = list(hw.hinted_states(states, template_hint))
    assert len(pairs) == 5
    rollouts = [rollout(state, hint) for state, hint in pairs]
    batch = ComposerDataCollator(tokenizer(), padding_side=side)(rollouts)
    assert assert_aligned(batch) == sum(sum(r.sampled) for r in rollouts)
    for (state, hint), row in zip(pairs, rollouts):
        teacher = align(tokenizer(), row).teacher_ids
        begin, end = row.site_span
        turn, n = list(row.ids[begin:end]), end - begin
        assert teacher[-n:] == turn
        assert teacher[:-n] == encode(tokenizer(), render(tokenizer(), insert_hint(state.messages, hint)))
        above = tokenizer().decode(teacher[:-n])
        assert above.index(hint) > above.index(state.messages[-1]["content"])
        assert above[above.index(hint) + len(hint) :].count("<|im_start|>") == 1


def test_the_room_imports_only_from_floors_below():
    below = set()
    for path in Path(hw.__file__).parent.glob("[a-z]*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        below |= {node.module.split(".")[0] for node in nodes if node.level == 2}
        assert {node.module for node in nodes if node.level == 1} <= {
            "place",
            "error_sites",
            "writers",
            "leaks",
        }
    assert below == {"traces"}


def test_a_teacher_that_costs_money_is_not_asked_without_its_books():
    site, teacher = site_of(failed(ToolCall("edit", GOOD), "odd")), EchoTeacher()
    teacher.usd = 0.01
    with pytest.raises(ValueError, match="costs money"):
        hw.judge_hint(hw.ask_teacher(teacher))(site)
    assert not teacher.requests


def test_a_tool_name_of_any_length_is_cut():
    """The name is what the model wrote; a hint holds a line of it at most."""
    context = HintContext(error_kind="unknown_tool", tool_name="x" * 5000 + "\n", available_tools=("read",))
    assert len(hw.template_hint(context)) < 300
