"""Tools in every state: what is documented, what calls show, and which calls fit."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.replay.consensus import consensus
from composer_nb.replay.pairs import consensus_table, extract_dpo_pairs
from composer_nb.traces import Action, ToolCall, TraceState
from composer_nb.traces.tools import builtin_tools, json_type, misfits, name_of, seen_tools, with_tools

ROOT = Path(__file__).parent.parent
DATA = ROOT / "composer_nb/traces/claude_code_tools.json"
ASK = [{"role": "user", "content": "Go."}]


def call(name, arguments=None, **more):
    return Action(tool_calls=(ToolCall(name, more if arguments is None else arguments),))


def state(action, place="a.jsonl:1", **more):
    return TraceState(f"{place}", ASK, action, source=place, **more)


# --- schemas ----------------------------------------------------------------------------------------


def test_documented_tools_are_function_schemas_with_their_required_arguments() -> None:
    tools = builtin_tools("claude-code")
    assert len({name_of(tool) for tool in tools}) == len(tools) > 10
    for tool in tools:
        parameters = tool["function"]["parameters"]
        assert (
            set(parameters["required"]) <= set(parameters["properties"]) and tool["function"]["description"]
        )
        json.dumps(tool)


def test_an_unknown_agent_and_a_schema_of_nothing_are_named() -> None:
    with pytest.raises(ValueError, match="agent='vim'; known: claude-code"):
        builtin_tools("vim")
    with pytest.raises(ValueError, match="not the schema of a function"):
        name_of({"type": "function"})
    with pytest.raises(ValueError, match="more than one schema of a"):
        next(with_tools([state(call("a"))], tools=[{"name": "a"}, {"function": {"name": "a"}}]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), min_size=1, max_size=5))
def test_every_call_fits_the_schema_that_was_inferred_from_it(calls) -> None:
    actions = [call("tool", arguments) for arguments in calls]
    schema = seen_tools(actions)["tool"].schema("tool")
    for action in actions:
        assert misfits(action, [schema]) == [] == misfits(action, [schema], inferred=["tool"])
    assert set(schema["function"]["parameters"]["required"]) == set.intersection(*map(set, calls))


@pytest.mark.parametrize("name", ["", "two words", "a" * 65, "a.b", "<tool>"])
def test_a_name_that_no_schema_may_have_is_not_inferred(name) -> None:
    assert seen_tools([call(name, {})]) == {}


def test_types() -> None:
    values = [None, True, 1, 1.5, "x", {}, []]
    assert [json_type(v) for v in values] == [
        "null",
        "boolean",
        "integer",
        "number",
        "string",
        "object",
        "array",
    ]
    schema = seen_tools([call("t", x=1), call("t", x=1.5), call("t", x=None)])["t"].schema("t")
    assert schema["function"]["parameters"]["properties"]["x"]["type"] == ["null", "number"]


# --- states -----------------------------------------------------------------------------------------


def test_all_states_of_a_session_get_what_any_of_them_called_and_no_other_session() -> None:
    states = [state(call("one"), "a:1"), state(call("two"), "a:2"), state(call("three"), "b:1")]
    names = [[name_of(t) for t in s.tools] for s in with_tools(states)]
    assert names == [["one", "two"], ["one", "two"], ["three"]]


def test_what_is_known_comes_before_what_is_inferred() -> None:
    mine = {"name": "deploy", "parameters": {"type": "object", "properties": {}}}
    states = [state(call("Bash", command="ls")), state(call("deploy", where="x"), "a.jsonl:2")]
    found = list(with_tools(states, tools=[mine], agent="claude-code"))
    assert found[0].tools[0] is mine and "inferred_tools" not in found[0].metadata
    assert sum(name_of(t) == "Bash" for t in found[1].tools) == 1
    bash = {"name": "Bash", "parameters": {}}
    assert next(with_tools(states, tools=[bash], agent="claude-code")).tools[0] is bash


def test_a_state_with_tools_and_one_without_anything_to_add_stay_the_same_object() -> None:
    own = state(call("x"), tools=[{"name": "x"}])
    plain = state(Action("prose"))
    assert next(with_tools([own], agent="claude-code")) is own
    assert (
        next(with_tools([plain])) is plain and next(with_tools([state(call("x"))], infer=False)).tools == ()
    )


def test_the_system_message_is_put_first_once() -> None:
    first = next(with_tools([state(Action("prose"))], system="Be brief."))
    assert first.messages[0] == {"role": "system", "content": "Be brief."} and len(first.messages) == 2
    assert next(with_tools([first], system="Be long.")).messages == first.messages


# --- what fits --------------------------------------------------------------------------------------

TOOLS = builtin_tools("claude-code")


@pytest.mark.parametrize(
    "action, says",
    [
        (call("Read", file_path="a"), None),
        (call("Read", file_path="a", limit=3), None),
        (call("Read", file_path="a", limit=3.0), None),
        (Action("prose"), None),
        (call("read", file_path="a"), "'read' is not on offer"),
        (call("Read", limit=3), "'file_path' is missing"),
        (call("Read", file_path=None), "'file_path' is null, not string"),
        (call("Read", "file_path=a"), "no JSON object"),
    ],
)
def test_calls_that_fit_and_calls_that_do_not(action, says) -> None:
    found = misfits(action, TOOLS)
    assert found == [] if says is None else len(found) == 1 and says in found[0]
    assert misfits(action, []) == []  # nothing is on offer, so nothing is asked


def test_an_unknown_argument_is_a_fault_only_where_the_schema_says_so() -> None:
    strict = {"name": "t", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    assert misfits(call("t", x=1), [strict]) == ["t: 'x' is unknown"]
    assert misfits(call("t", x=1), [strict], inferred=["t"]) == []


DEEP = {
    "name": "t",
    "parameters": {
        "type": "object",
        "required": ["mode"],
        "properties": {
            "mode": {"type": "string", "enum": ["read", "write"]},
            "count": {"enum": [1, 2]},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object", "required": ["old"], "additionalProperties": False,
                    "properties": {"old": {"type": "string"}, "line": {"type": "integer"}},
                },
            },
            "where": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["path"]}]},
            "far": {"$ref": "#/$defs/far"},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"mode": "append"}, "'mode' is none of the 2 values that are allowed"),
        ({"count": True}, "'count' is none of the 2 values that are allowed"),
        ({"edits": [{"old": "a"}, {"line": 1}]}, "'old' is missing in an item of 'edits'"),
        ({"edits": [{"old": 3}]}, "'old' in an item of 'edits' is integer, not string"),
        ({"edits": [{"old": "a", "new": "b"}]}, "'new' is unknown in an item of 'edits'"),
        ({"edits": {"old": "a"}}, "'edits' is object, not array"),
        ({"where": {"file": "x"}}, "'where' fits none of the 2 forms that are allowed"),
        ({"where": 3}, "'where' fits none of the 2 forms that are allowed"),
        ({"count": 2, "edits": [{"old": "a", "line": 2}], "where": {"path": "x"}, "far": 3, "own": 1}, None),
    ],
)
def test_values_are_held_to_the_schema_all_the_way_down(more, says) -> None:
    found = misfits(call("t", **({"mode": "read"} | more)), [DEEP])
    assert found == ([] if says is None else [f"t: {says}"])
    assert misfits(call("t", **({"mode": "read"} | more)), [DEEP], inferred=["t"]) == []
    if says:
        asked = state(call("t", mode="read"), tools=[DEEP])
        wrong = call("t", **({"mode": "read"} | more))
        votes = consensus(asked, {"A": wrong, "B": wrong, "C": wrong, "D": call("t", mode="write")})
        assert votes.winner != wrong and votes.invalid.keys() == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"enum": None}, 3, True), ({"enum": [1]}, 1.0, True), ({"enum": [1]}, True, False),
        ({"const": "a"}, "a", True), ({"const": "a"}, "b", False), (True, 3, True),
        ({"type": "string", "nullable": True}, None, True), ({"type": "string"}, None, False),
        ({"type": "object", "required": True, "properties": {"y": True}}, {}, True),
        ({"type": "object", "properties": None, "required": ["y"]}, {}, False),
        ({"anyOf": None, "type": "string"}, "a", True), ({"type": "array", "items": True}, [1], True),
    ],
)  # fmt: skip
def test_odd_schemas_of_the_wild_end_no_vote(schema, value, fits) -> None:
    tool = {"name": "t", "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    assert (misfits(call("t", x=value), [tool]) == []) == fits
    assert misfits(call("t"), [tool]) == ["t: 'x' is missing"]


# --- votes ------------------------------------------------------------------------------------------


def test_a_call_that_does_not_fit_is_counted_and_never_chosen() -> None:
    asked = state(call("Read", file_path="a"), tools=TOOLS)
    wrong, right = call("Read", path="b"), call("Read", file_path="b")
    found = consensus(asked, {"A": wrong, "B": wrong, "C": right, "D": right})
    assert found.outcome == "pair" and found.winner == right and found.abstentions == ("A", "B")
    assert found.invalid == {"A": ("Read: 'file_path' is missing",), "B": ("Read: 'file_path' is missing",)}
    assert consensus(asked, {"A": wrong, "B": wrong}).outcome == "no_replies"
    (report,) = consensus_table([asked], {asked.state_id: {"A": wrong, "B": right}}, [1])
    assert report.invalid == {"A": 1} and report.outcomes["pair"] == 1


def test_two_that_only_talk_do_not_beat_a_call_unless_asked_for() -> None:
    asked = state(call("Bash", command="pytest"), tools=TOOLS)
    talk = {"A": Action("OK."), "B": Action("OK.")}
    assert consensus(asked, talk).outcome == "unlike"
    assert extract_dpo_pairs([asked], {asked.state_id: talk}) == []
    (pair,) = extract_dpo_pairs([asked], {asked.state_id: talk}, unlike=True)
    assert pair.chosen == "OK."
    assert consensus_table([asked], {asked.state_id: talk}, [2])[0].outcomes["unlike"] == 1
    prose = state(Action("I am done."), tools=TOOLS)
    assert consensus(prose, {n: call("Bash", command="ls") for n in "AB"}).outcome == "unlike"
    assert consensus(prose, talk).outcome == "pair"


def test_an_option_that_votes_do_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="judges"):
        extract_dpo_pairs([state(call("x"))], {}, judges=None)


# --- tools by version ---------------------------------------------------------------------------------


def offered(version):
    return {name_of(tool): tool["function"]["parameters"] for tool in builtin_tools("claude-code", version)}


def test_a_tool_stands_once_in_every_release_that_was_read_and_between_them() -> None:
    known = json.loads(DATA.read_text())
    releases = [tuple(map(int, one.split("."))) for one in known["releases"]]
    assert releases == sorted(set(releases)) and len(releases) > 10
    between = [".".join(map(str, (*one[:2], one[2] + 1))) for one in releases]
    for version in [*known["releases"], *between, "0.2.1", "99.0.0", ""]:
        names = [name_of(tool) for tool in builtin_tools("claude-code", version)]
        assert len(names) == len(set(names)) >= 14, version
        assert {"Bash", "Read", "Write", "Edit", "Glob", "Grep"} <= set(names)
    for tool in known["tools"]:
        since, until = (tuple(map(int, tool.get(end, "99.0.0").split("."))) for end in ("since", "until"))
        assert since < until and set(tool) <= {"since", "until", "type", "function"}


@pytest.mark.parametrize(
    "version, has, lacks",
    [
        ("0.2.99", {"MultiEdit", "LS", "NotebookRead"}, {"TaskOutput"}),  # older than the first: as the first
        ("1.0.88", {"MultiEdit", "LS", "Task"}, {"NotebookRead", "Agent"}),
        ("2.0.0", {"MultiEdit"}, set()),  # between two that were read: the older one's
        ("2.0.1", {"BashOutput", "Task"}, {"MultiEdit", "LS"}),
        ("2.1.62", {"Task", "TaskStop"}, {"Agent", "KillShell"}),
        ("2.1.63", {"Agent"}, {"Task"}),
        ("2.1.332-beta.1", {"Agent", "TaskCreate"}, {"TaskOutput"}),
        ("", {"Agent", "TaskCreate"}, {"TaskOutput", "Task", "MultiEdit"}),
    ],
)
def test_tools_come_and_go_with_the_version(version, has, lacks) -> None:
    assert has <= set(offered(version)) and not lacks & set(offered(version))


def test_an_argument_that_changed_its_name() -> None:
    assert "shell_id" in offered("1.0.60")["BashOutput"]["required"]
    assert offered("1.0.88")["BashOutput"]["required"] == ["bash_id"]
    assert "sandbox" in offered("1.0.88")["Bash"]["properties"]
    assert "sandbox" not in offered("2.0.1")["Bash"]["properties"]


@pytest.mark.parametrize("version", ["two", "2.1", "v2.1.0", " 2.1.0", "2..1"])
def test_a_version_that_is_not_three_numbers_is_refused_by_its_name(version) -> None:
    with pytest.raises(ValueError, match="is not three numbers, as in 2"):
        builtin_tools("claude-code", version)


def test_each_session_gets_the_tools_of_its_own_version() -> None:
    def of(place, version):
        return state(call("Read", file_path="a"), place, metadata={"version": version})

    versions = {"a": "1.0.88", "b": "2.1.100", "c": "", "d": "unknown", "e": None}
    states = [of(f"{name}.jsonl:{n}", version) for name, version in versions.items() for n in (1, 2)]
    found = {one.source[0]: set(map(name_of, one.tools)) for one in with_tools(states, agent="claude-code")}
    assert found["a"] == set(offered("1.0.88")) and found["b"] == set(offered("2.1.100"))
    assert found["c"] == found["d"] == found["e"] == set(offered(""))


def test_what_a_user_gives_comes_before_what_a_version_has() -> None:
    mine = {"type": "function", "function": {"name": "Bash", "description": "mine", "parameters": {}}}
    one = next(
        with_tools([state(call("Bash"), metadata={"version": "2.0.1"})], tools=[mine], agent="claude-code")
    )
    assert one.tools[0] is mine and [name_of(tool) for tool in one.tools].count("Bash") == 1


TYPES = """
/** ours */
export interface BashInput {
  /**
   * a command; with; semicolons: and {braces}
   */
  command: string;
  kind?: "a" | "b";
  level: 1 | 2;
  maybe: string | number;
  deep: {
    [k: string]: unknown;
  };
  rows:
    | [{ one: string; two?: boolean }]
    | [{ one: string; two?: boolean }, { one: string; two?: boolean }];
  names?: string[];
  pairs: [{ x: number }, ...{ x: number }[]];
  any: unknown;
  block: boolean;
}
export interface SomethingElseInput {}
export interface TaskListInput {}
"""


def test_types_of_a_release_become_json_schema(tmp_path) -> None:
    script = runpy.run_path(str(ROOT / "scripts/agent_tools.py"))
    found = dict(script["shapes"](TYPES))
    assert set(found) == {"Bash", "TaskList"} and found["TaskList"]["properties"] == {}
    of = found["Bash"]["properties"]
    assert of["command"] == {"type": "string"} and of["kind"] == {"type": "string", "enum": ["a", "b"]}
    assert of["level"] == {"type": "number", "enum": [1, 2]} and of["maybe"] == {"type": ["string", "number"]}
    assert of["rows"]["items"]["required"] == ["one"] and of["names"]["items"] == {"type": "string"}
    assert of["pairs"]["items"]["properties"] == {"x": {"type": "number"}} and of["any"] == {}
    assert found["Bash"]["required"] == ["command", "level", "maybe", "deep", "rows", "pairs", "any"]
    for version, text in {"1.0.9": TYPES, "1.0.10": TYPES.replace("TaskListInput", "Gone")}.items():
        place = tmp_path / version / "package" / "sdk-tools.d.ts"
        place.parent.mkdir(parents=True)
        place.write_text(text)
    listed = script["ranges"](tmp_path)
    assert [(one["name"], one["since"], one.get("until")) for one in listed] == [
        ("TaskList", "1.0.9", "1.0.10"), ("Bash", "1.0.9", None)]  # fmt: skip
    with pytest.raises(ValueError, match="stands where"):
        dict(script["shapes"]("export interface BashInput {\n  command string;\n}"))


def test_a_vendors_own_tool_spoils_no_vote():
    """It has a type and no schema, and stands beside functions in some logs."""
    read = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    action = Action("", (ToolCall("read", {}),))
    assert misfits(action, [{"type": "web_search"}, read]) == []
    assert misfits(action, [{"type": "web_search"}]) == []
