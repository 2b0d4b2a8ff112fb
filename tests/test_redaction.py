"""No planted secret survives anywhere in a state; what is no secret stays; JSON stays JSON; no text makes it
slow.

Secrets are assembled from pieces at run time: no secret-looking text stands in this file.
"""

import base64
import copy
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import composer_nb
from composer_nb.drills.secrets import HEX, Maker, by_form, by_place
from composer_nb.redaction import (
    NotCleanError,
    Redactor,
    Span,
    assert_clean,
    assigned_spans,
    detectors,
    home_name,
    home_spans,
    ip_spans,
    kingfisher_spans,
    known_spans,
    mail_spans,
)
from composer_nb.traces import Action, ToolCall, ToolFailure, TraceState, state_record

LIMIT_S = 8  # for 200 kB; a quadratic pattern needs minutes


EVERYTHING = {kind: (secret, secret) for kind, secret in by_form().items()} | by_place()


@pytest.fixture(scope="module", autouse=True)
def scanner():
    """Compile Kingfisher's rules once, outside any time limit."""
    detectors._scanner()


def a_state(**changes) -> TraceState:
    call = ToolCall("bash", {"command": "ls", "env": {"N": 1}}, "c1")
    fields = {
        "state_id": "s/1",
        "messages": [{"role": "user", "content": "Go on."}],
        "student_action": Action("Done.", (call,), "Hm."),
        "failures": (ToolFailure(call, "failed"),),
        "student_ids": (1, 2),
        "source": "log.jsonl:3",
    }
    return TraceState(**fields | changes)


def everything(state: TraceState) -> str:
    return json.dumps(state_record(state), ensure_ascii=False)


# --- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_planted_secret_is_replaced_and_reported(kind):
    secret, text = EVERYTHING[kind]
    redactor = Redactor()
    redacted = redactor.text(f"first line\n{text}\nlast line")
    assert secret not in redacted and not any(secret[i : i + 8] in redacted for i in range(len(secret) - 7))
    assert (
        redacted.startswith("first line\n")
        and redacted.endswith("\nlast line")
        and re.search("<[A-Z]+(_1)?>", redacted)
    )
    assert redactor.report.counts.total() >= 1
    assert secret not in repr(redactor.report) + redactor.report.table() + repr(redactor)


def test_twenty_kinds_are_tested():
    assert len(EVERYTHING) >= 20


@pytest.mark.parametrize("kind", by_form())
def test_our_own_table_is_enough_for_the_known_forms(kind):
    secret = by_form(3)[kind]
    assert any(
        secret[5:-5] in f"a {secret} b"[span.start : span.end] for span in known_spans(f"a {secret} b")
    )


def test_kingfisher_finds_what_our_table_does_not():
    token = "do" + "p_v1_" + Maker(0).some(64, HEX)
    wrapped = base64.b64encode(f"my {by_form()['github classic']}!".encode()).decode()
    assert not list(known_spans(token)) and not list(known_spans(wrapped))
    assert Redactor().text(f"{token} {wrapped}") == "<SECRET_1> <SECRET_2>"


def test_kingfisher_offsets_are_ours_also_with_other_alphabets_and_broken_text():
    secret = by_form()["github classic"]
    text = f"é 漢字 \ud800 \0 😀 {secret} ü"
    (span,) = kingfisher_spans(text)
    assert text[span.start : span.end] == secret
    assert Redactor().text(text) == text.replace(secret, "<SECRET_1>")


PLACES = [
    "content",
    "parts",
    "arguments text",
    "tool output",
    "message key",
    "action",
    "thinking",
    "call",
    "call text",
    "call key",
    "call id",
    "failure",
    "failed call",
    "tools",
    "metadata",
    "state_id",
    "model",
]


def planted(place: str, text: str) -> TraceState:
    call, ok = ToolCall("f", {"a": [text, {"b": text}]}, "c1"), ToolCall("f", {}, "c1")
    messages = [{"role": "user", "content": "hi"}]
    nested = json.dumps({"a": [text], "b": json.dumps({"c": text, "n": 1.50})})
    return {
        "content": lambda: a_state(messages=[*messages, {"role": "tool", "content": text}]),
        "parts": lambda: a_state(messages=({"role": "user", "content": [{"type": "text", "text": text}]},)),
        "arguments text": lambda: a_state(
            messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested}}]}]
        ),
        "tool output": lambda: a_state(
            messages=[*messages, {"role": "tool", "content": json.dumps([{"out": text}], indent=1)}]
        ),
        "message key": lambda: a_state(messages=[{"role": "user", "content": "", text: 1}]),
        "action": lambda: a_state(student_action=Action(text)),
        "thinking": lambda: a_state(student_action=Action("x", thinking=text)),
        "call": lambda: a_state(student_action=Action("", (call,))),
        "call text": lambda: a_state(student_action=Action("", (ToolCall("f", "{broken " + text),))),
        "call key": lambda: a_state(student_action=Action("", (ToolCall("f", {text: {text: 1}}),))),
        "call id": lambda: a_state(student_action=Action("", (ToolCall("f", {}, text),))),
        "failure": lambda: a_state(failures=(ToolFailure(ok, text),)),
        "failed call": lambda: a_state(failures=(ToolFailure(call, "no", text),)),
        "tools": lambda: a_state(tools=({"name": "f", "description": text},)),
        "metadata": lambda: a_state(metadata={"git": {"remote": (text,)}}),
        "state_id": lambda: a_state(state_id=text),
        "model": lambda: a_state(model=text),
    }[place]()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["github classic", "pem", "database url", "e-mail", "home"])
def test_no_field_of_a_state_keeps_a_secret(place, kind):
    secret, text = EVERYTHING[kind]
    redactor = Redactor()
    redacted = redactor.state(planted(place, text))
    assert secret not in everything(redacted) and json.dumps(secret)[1:-1] not in everything(redacted)
    assert secret not in redactor.report.table() and redactor.report.found[0].where.startswith(
        f"{redacted.state_id}: "
    )
    assert_clean(redacted)
    with pytest.raises(NotCleanError) as caught:
        assert_clean(planted(place, text))
    assert secret not in str(caught.value) + repr(caught.value.report)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(by_form())),
    st.integers(0, 99),
    st.sampled_from(PLACES),
    st.text(max_size=12),
    st.text(max_size=12),
)
def test_a_secret_of_known_form_survives_nowhere(kind, seed, place, before, after):
    secret = by_form(seed)[kind]
    redacted = Redactor().state(planted(place, before + secret + after))
    assert secret not in everything(redacted) and json.dumps(secret)[1:-1] not in everything(redacted)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(by_place())),
    st.integers(0, 99),
    st.sampled_from(PLACES),
    st.text(max_size=12),
    st.text(max_size=12),
)
def test_a_secret_known_by_its_place_survives_nowhere(kind, seed, place, before, after):
    secret, text = by_place(seed)[kind]
    redacted = Redactor().state(planted(place, f"{before}\n{text}\n{after}"))
    assert secret not in everything(redacted)


def test_a_password_that_was_named_once_is_replaced_everywhere():
    secret = "z7" + Maker(5).some(10) + "/+"
    state = a_state(
        messages=[
            {"role": "tool", "content": f"PASSWORD={secret}"},
            {"role": "tool", "content": f"glued{secret}word"},
        ],
        student_action=Action(f"use {secret}", thinking=secret),
        metadata={"url": f"/x/{secret.replace('/', '%2F').replace('+', '%2B')}/y"},
    )
    redacted = Redactor().state(state)
    assert redacted.messages[1]["content"] == "glued<SECRET_1>word" and redacted.student_action == Action(
        "use <SECRET_1>", thinking="<SECRET_1>"
    )
    assert redacted.metadata["url"] == "/x/<SECRET_1>/y"


def test_a_common_word_that_was_a_password_is_not_replaced_everywhere():
    text = 'password: "elephants"\nmany elephants'
    assert Redactor().text(text) == 'password: "<SECRET_1>"\nmany elephants'


def test_the_key_of_an_object_makes_its_value_a_secret():
    value = {
        "password": "hunter",
        "db": {"client_secret": "correct horse battery"},
        "token": ["abcdefg1"],
        "n": "hunter-gatherer",
    }
    assert Redactor().value(value) == {
        "password": "<SECRET_1>",
        "db": {"client_secret": "<SECRET_2>"},
        "token": ["<SECRET_3>"],
        "n": "hunter-gatherer",
    }
    assert json.loads(Redactor().text(json.dumps(value))) == Redactor().value(value)


def test_a_value_without_quotes_needs_a_digit_where_its_name_is_lower_case():
    assert Redactor().text("secret: elephants") == "secret: elephants"
    assert Redactor().text('secret: "elephants"') == 'secret: "<SECRET_1>"'
    assert Redactor().text("SECRET=elephants") == "SECRET=<SECRET_1>"
    assert Redactor().text("DB_PASSWORD=a1b2c3;(d,e\n") == "DB_PASSWORD=<SECRET_1>\n"


@pytest.mark.parametrize(
    "value",
    [
        {"password": "string"},
        {"token": "identifier"},
        {"api_key": "${API_KEY}"},
        {"secret": "abc"},
        {"max_token": "12345678"},
    ],
)
def test_a_reference_under_the_key_of_a_secret_stays(value):
    assert Redactor().value(value) == value and Redactor().text(json.dumps(value)) == json.dumps(value)


def test_placeholders_in_the_text_are_nobodys():
    redactor = Redactor(users=["secret", "home"])
    once = redactor.value({"password": "x9<SECRET_7>", "text": "/home/adalove at home, a secret <SECRET_7>"})
    assert once == {"password": "<SECRET_1><SECRET_7>", "text": "<HOME> at <USER_1>, a <USER_2> <SECRET_7>"}
    assert redactor.value(once) == once


def test_a_truncated_private_key_goes_as_far_as_it_looks_like_one():
    pem = by_form()["pem"].split("\n")
    assert Redactor().text("\n".join(pem[:3]) + "\nand so on") == "<SECRET_1>and so on"
    assert Redactor().text("x " + "\\n".join(pem) + " y") == "x <SECRET_1> y"


# --- people and places -----------------------------------------------------------------------------


def test_the_user_name_is_replaced_where_it_recurs():
    state = a_state(
        messages=[{"role": "user", "content": "I am Adalove, adalove_x; see /home/adalove/x. adaloves"}],
        source="/home/adalove/s.jsonl:1",
    )
    redacted = Redactor().state(state)
    assert (
        redacted.messages[0]["content"] == "I am <USER_1>, <USER_1>_x; see <HOME>/x. adaloves"
        and redacted.source == "<HOME>/s.jsonl:1"
    )


def test_a_name_in_the_source_is_looked_for_in_the_messages_and_ids_too():
    redactor = Redactor()
    redacted = redactor.state(
        a_state(
            state_id="adalove-7/1",
            messages=[{"role": "user", "content": "adalove"}],
            source=r"C:\Users\adalove\s.jsonl",
        )
    )
    assert (
        "adalove" not in everything(redacted) + redactor.report.table()
        and redacted.source == r"<HOME>\s.jsonl"
    )


def test_the_source_is_only_searched_for_homes():
    assert (
        Redactor().state(a_state(source="logs/ada@example.org.jsonl:1")).source
        == "logs/ada@example.org.jsonl:1"
    )


@pytest.mark.parametrize("name", ["ubuntu", "root", "max", "id", "7777"])
def test_shared_names_and_words_of_python_are_not_looked_for_elsewhere(name):
    assert (
        home_name(f"/home/{name}") == ""
        and Redactor().text(f"/home/{name}/x, {name}(x)") == f"<HOME>/x, {name}(x)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "src/home/index.js",
        "https://example.com/home/page",
        "$HOME/x",
        "/home/<user>",
        "~/x",
        "/homework/x",
        "components/Users/list",
    ],
)
def test_what_is_no_home_stays(text):
    assert not list(home_spans(text))


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:a/b.git",
        "x@W.T",
        "q@k.transpose(0)",
        "icon@2x.png",
        "npm i left-pad@1.3.0",
        "@decorator.name",
        "a @ b.cd",
    ],
)
def test_what_is_no_address_stays(text):
    assert not list(mail_spans(text))


def test_addresses_of_machines_are_replaced_on_request():
    text = "10.1.2.3:80 and 2001:db8::1, 127.0.0.1 ::1 12:30:15 1.2.3.4.5 300.1.1.1"
    assert Redactor().text(text) == text
    assert Redactor(ips=True).text(text) == "<IP_1>:80 and <IP_2>, 127.0.0.1 ::1 12:30:15 1.2.3.4.5 300.1.1.1"
    assert len(list(ip_spans(text))) == 2


def test_each_family_can_be_left_out_and_renamed():
    text = "ada@example.org in /home/adalove"
    assert Redactor(emails=False).text(text) == "ada@example.org in <HOME>"
    assert Redactor(homes=False).text(text) == "<EMAIL_1> in /home/adalove"
    assert (
        Redactor(detectors=[], placeholders={"email": "[mail {n}]", "home": "[home]"}).text(text)
        == "[mail 1] in [home]"
    )
    assert Redactor(users=["Ada"], emails=False, homes=False).text("Ada, adam") == "<USER_1>, adam"
    with pytest.raises(ValueError, match="list of names"):
        Redactor(users="Ada")


@pytest.mark.parametrize(
    "wrong", [{"email": 'a"b'}, {"email": ""}, {"email": "a\\b"}, {"mail": "x"}, {"home": "é"}]
)
def test_a_placeholder_that_json_would_escape_is_refused(wrong):
    with pytest.raises(ValueError, match="placeholder"):
        Redactor(placeholders=wrong)


def test_ones_own_detector():
    # noqa: E731
    tickets = lambda text: [Span(*hit.span(), "ticket") for hit in re.finditer(r"ACME-\d+", text)]
    redactor = Redactor(detectors=[tickets])
    assert redactor.text(
        "see ACME-12, ACME-7"
    ) == "see <SECRET_1>, <SECRET_2>" and redactor.report.counts == {"ticket": 2}


# --- what stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "password = getpass.getpass()",
        "token: str = None",
        'token = os.environ["TOKEN"]',
        "max_tokens=4096",
        "api_key=settings.api_key",
        "secret = ${SECRET}",
        "export TOKEN=$(cat x)",
        "PASSWORD=$DB_PASSWORD",
        "API_KEY=<your key>",
        "--token TOKEN",
        "password: '********'",
        "if password == 'password':",
        "n_token: 1234567890",
        'grant_type = "client_secret"',
        "tokenizer(text)",
        'token = "identifier"',
        "https://example.com/a?page=2&sort=name",
        "http://localhost:8080/@vite/client",
        "Authorization: Bearer $TOKEN",
        "Authorization: Bearer <token>",
        "the bearer of this letter",
        "git commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "id 123e4567-e89b-12d3-a456-426614174000",
        "sk-learn",
        "task-" + "abcdefghij" * 3,
        "task-abcdefghij",
        "hf_model_name",
        "docker run -u 1000:1000 x",
        "pass",
        "compass: northwest1",
        "toolu_01A09q90qw90lq917835lq9",
        "msg_013Zva2CMHLNnXjNJJKqJ2EF",
        "call_aB3dE5fG7hJ9kL1mN3pQ5rS7",
        "cookie: name",
        "mysql -p app",
        "the machine login",
    ],
)
def test_ordinary_code_stays(text):
    assert Redactor().text(text) == text


def test_ordinary_code_has_no_false_alarms():
    count = lines = 0
    for path in Path(composer_nb.__file__).parent.rglob("*.py"):
        text = path.read_text()
        lines += text.count("\n")
        count += sum(1 for detector in Redactor(emails=False).detectors for _ in detector(text))
    assert lines > 3000 and count <= lines / 1000


def test_random_looking_data_stays():
    rng = random.Random(0)
    lines = [
        f"sha256:{rng.getrandbits(256):064x} {rng.getrandbits(160):040x} "
        f"data:image/png;base64,{base64.b64encode(rng.randbytes(200)).decode()}"
        for _ in range(300)
    ]
    text = "\n".join(lines)
    assert Redactor().text(text) == text


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats(allow_nan=False)
        | st.text('abcdefghij {}[]":,\\\nü', max_size=30),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text("abcdefgh", max_size=5), inner, max_size=4)
        ),
    )
)
def test_values_without_secrets_are_unchanged(value):
    text, redactor = json.dumps(value, indent=1), Redactor()
    assert redactor.value(value) == value and redactor.text(text) == text and not redactor.report.found


def test_a_clean_state_comes_back_equal_and_keeps_its_ids():
    state = a_state(
        messages=({"role": "user", "content": [{"type": "text", "text": "hi"}]},),
        tools=({"name": "f"},),
        metadata={"n": (1, 2.5, None, True)},
    )
    assert Redactor().state(state) == state and Redactor().state(state).student_ids == (1, 2)
    assert_clean(state)


def test_ids_stay_when_only_the_context_changed_and_go_when_the_action_did():
    secret = by_form()["npm"]
    assert Redactor().state(a_state(messages=[{"role": "user", "content": secret}])).student_ids == (1, 2)
    for action in (Action(secret), Action("x", thinking=secret), Action("", (ToolCall("f", {"a": secret}),))):
        assert Redactor().state(a_state(student_action=action)).student_ids is None


def test_what_was_given_is_not_changed():
    state = planted("call", by_form()["npm"])
    before = copy.deepcopy(state)
    Redactor().state(state)
    assert state == before


# --- coherence -------------------------------------------------------------------------------------


def test_the_same_secret_has_the_same_placeholder_in_all_states():
    forms, redactor = by_form(), Redactor()
    states = [a_state(student_action=Action(forms[kind])) for kind in ("npm", "google", "npm")]
    assert [state.student_action.text for state in redactor.states(states)] == [
        "<SECRET_1>",
        "<SECRET_2>",
        "<SECRET_1>",
    ]
    assert (
        redactor.twin().text(forms["google"]) == "<SECRET_1>"
        and redactor.text(forms["google"]) == "<SECRET_2>"
    )


def test_states_are_read_one_at_a_time():
    redactor, read = Redactor(), []
    states = redactor.states(read.append(i) or a_state(state_id=f"s/{i}") for i in range(3))
    assert read == [] and next(states).state_id == "s/0" and read == [0]


def test_calls_in_messages_and_action_agree_and_mappings_stay_mappings():
    secret = by_form()["stripe"]
    arguments = {"key": secret, "deep": [{"path": "/home/adalove/x"}], "n": 1.5}
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}}],
    }
    redacted = Redactor().state(
        a_state(messages=[message], student_action=Action("", (ToolCall("f", arguments),)))
    )
    kept = redacted.student_action.tool_calls[0].arguments
    assert kept == {"key": "<SECRET_1>", "deep": [{"path": "<HOME>/x"}], "n": 1.5}
    assert json.loads(redacted.messages[0]["tool_calls"][0]["function"]["arguments"]) == kept


def test_new_numbers_keep_clear_of_those_in_the_text():
    assert (
        Redactor().text("<EMAIL_1> <EMAIL_2> a@example.org b@example.org")
        == "<EMAIL_1> <EMAIL_2> <EMAIL_3> <EMAIL_4>"
    )


def test_two_keys_that_become_one_are_both_kept():
    assert Redactor().value({"/home/adalove": 1, "/home/bobsmith": 2}) == {"<HOME>": 1, "<HOME>~1": 2}


def test_the_report_counts_kinds_and_places():
    secret, redactor = by_form()["npm"], Redactor()
    redactor.state(
        a_state(messages=[{"role": "user", "content": f"{secret} {secret}"}], metadata={"x": secret})
    )
    assert [(r.kind, r.placeholder, r.where, r.count) for r in redactor.report.found] == [
        ("npm token", "<SECRET_1>", "s/1: messages[0].content", 2),
        ("npm token", "<SECRET_1>", "s/1: metadata.x", 1),
    ]
    assert redactor.report.counts == {"npm token": 3}
    assert redactor.report.table().splitlines()[1].split() == [
        "npm",
        "token",
        "<SECRET_1>",
        "3",
        "2",
        "s/1:",
        "messages[0].content",
    ]


FRAGMENTS = [
    *by_form().values(),
    *(text for _, text in by_place().values()),
    "<SECRET_1>",
    "<HOME>",
    "<EMAIL_2>",
    "<USER_1>",
    "<",
    ">",
    "/home/",
    "ada",
    "adalove",
    "@",
    "@example.org",
    "password=",
    "token: ",
    '"',
    "'",
    "\\",
    "\\n",
    "\n",
    " ",
    "://",
    ":",
    "=",
    "{",
    "}",
    "[",
    "]",
    ",",
    "?key=",
    "a1b2c3d4e5",
    "é",
    "SECRET",
    "_1",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_a_second_pass_changes_nothing(fragments):
    redactor = Redactor()
    once = redactor.value(["".join(fragments), {"".join(fragments[:3]): "".join(fragments[3:])}])
    assert redactor.value(once) == once
    assert_clean([once])


def test_what_a_replacement_lays_bare_is_replaced_too():
    text = by_form()["aws id"] + "sk-" + "abcdefgh" * 3
    assert Redactor().text(text) == "<SECRET_1><SECRET_2>"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.integers(0, 3),
)
def test_json_in_strings_stays_json(fragments, indent, ascii_only, depth):
    text = "".join(fragments)
    document = value = {"a": [text, 1.50, None, True], "password": text, "x" + text: {"n": 10**20}}
    for _ in range(depth):
        document = {"inner": json.dumps(document, indent=indent, ensure_ascii=ascii_only)}
    redacted = json.loads(Redactor().text(json.dumps(document, indent=indent, ensure_ascii=ascii_only)))
    for _ in range(depth):
        redacted = json.loads(redacted["inner"])
    assert redacted == dict(zip(redacted, Redactor().value(value).values()))


def test_json_keeps_its_numbers_and_spaces():
    text = (
        '{ "n":1.50 ,"big":123456789012345678901234567890, "u":"\\u00e9", "slash":"a\\/b", '
        '"mail" : "ada@example.org" , "n":2}'
    )
    assert Redactor().text(text) == text.replace("ada@example.org", "<EMAIL_1>")


# --- the gate, faults, speed -----------------------------------------------------------------------


def test_the_gate_takes_states_values_and_streams_and_the_settings_of_a_redactor():
    assert_clean(iter([a_state(), {"role": "user", "content": "hi"}, "hi"]))
    assert_clean("at 10.1.2.3")
    with pytest.raises(NotCleanError, match=r"IP address left at text"):
        assert_clean({"text": "at 10.1.2.3"}, redactor=Redactor(ips=True))
    with pytest.raises(NotCleanError, match=r"e-mail left at \[1\]\.content"):
        assert_clean([{"content": "hi"}, {"content": "a@example.org"}])


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), Path("x"), {"a": [1, b"x"]}])
def test_what_cannot_be_read_is_refused(value):
    with pytest.raises(TypeError, match="no JSON-like value"):
        Redactor().value(value)


def test_a_missing_scanner_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "kingfisher_sdk", None)
    with pytest.raises(ImportError, match=r"composer-notebooks\[replay\]"):
        detectors._scanner.__wrapped__()


def test_importing_the_room_does_not_import_the_scanner():
    code = "import sys, composer_nb.redaction; sys.exit('kingfisher_sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def slow_texts(size: int = 200_000) -> dict[str, str]:
    pieces = [
        "cookie:",
        "cookie: a=",
        "machine a login b password ",
        "machine ",
        "mysql ",
        "mysql -p",
        "a",
        " ",
        "\\",
        "@",
        "/",
        "eyJ",
        ".eyJ",
        "sk-",
        "aws key ",
        "curl ",
        "curl -u a",
        "://",
        "://a:",
        "%3a%2f%2f",
        "password=",
        'password="',
        "secret=(",
        "token: ",
        "?token=",
        "x-",
        "bearer ",
        "a@",
        "a.",
        "@a.",
        "1:",
        "1.",
        "/home/",
        "\\Users\\",
        "-" * 5 + "BEGIN RSA PRIVATE " + "KEY" + "-" * 5,
        "-----",
        "[",
        '{"a":',
        '"',
        "AKIA",
    ]
    texts = {piece: piece * (size // len(piece)) for piece in pieces}
    return texts | {
        "secret_key and spaces": "secret_key" + " " * size,
        "unclosed": 'password="' + "xpassword=" * (size // 10),
        "open list": "[" * size,
        "lines": "\n" * size,
    }


@pytest.mark.parametrize("kind", slow_texts())
def test_no_text_makes_it_slow(kind):
    text, start = slow_texts()[kind], time.perf_counter()
    Redactor(ips=True).text(text)
    assert time.perf_counter() - start < LIMIT_S


def test_a_line_of_a_megabyte_and_a_log_of_a_megabyte():
    line = "request id=9f86d081884c7d659a2feaa0c55ad015 path=/api/v1/items status=200 "
    secret, start = by_form()["npm"], time.perf_counter()
    for text in (line * 14000, (line + "\n") * 14000):
        assert Redactor().text(text + secret + text) == text + "<SECRET_1>" + text
    assert time.perf_counter() - start < 5 * LIMIT_S


def test_a_session_is_searched_once_and_not_once_per_state():
    seen = []
    redactor = Redactor(detectors=[lambda text: seen.append(len(text)) or ()], homes=False, emails=False)
    messages = [{"role": "tool", "content": f"output {i} " + "x" * 1000} for i in range(40)]
    for i in range(1, 41):
        redactor.state(a_state(state_id=f"session/{i}", messages=messages[:i]))
    assert sum(seen) < 4 * 40 * 1000


def test_a_message_that_came_before_is_known_by_what_it_says():
    redactor, message = Redactor(), {"role": "user", "content": "ada@example.org"}
    assert redactor.state(a_state(messages=[message])).messages[0]["content"] == "<EMAIL_1>"
    message["content"] = "swift, bob@example.org"
    assert redactor.state(a_state(messages=[message])).messages[0]["content"] == "swift, <EMAIL_2>"
    message["content"], told = "swift, bob@example.org", {"role": "user", "content": "/home/swift"}
    assert redactor.state(a_state(messages=[message, told])).messages[0]["content"] == "<USER_1>, <EMAIL_2>"
    assert redactor.state(a_state(messages=[message])).messages[0]["content"] == "swift, <EMAIL_2>"


def test_a_session_of_states_that_share_messages_is_counted_state_by_state():
    redactor, messages = (
        Redactor(),
        [{"role": "user", "content": "by ada@example.org"}, {"role": "user", "content": "x"}],
    )
    first, second = redactor.states(
        [a_state(state_id="s/0", messages=messages[:1]), a_state(messages=messages)]
    )
    assert first.messages[0] is second.messages[0]
    assert [r.where for r in redactor.report.found] == [
        "s/0: messages[0].content",
        "s/1: messages[0].content",
    ]


def test_an_error_half_way_loses_no_report():
    redactor = Redactor()
    redactor.text("ada@example.org")
    with pytest.raises(TypeError, match=r"messages\[1\]\.content"):
        redactor.state(a_state(messages=[{"content": "bob@example.org"}, {"content": b"x"}]))
    assert redactor.report.counts == {"e-mail": 1}


def test_assigned_values_are_read_once():
    assert len(list(assigned_spans("password=" * 3 + "a1b2c3d4"))) == 1


@pytest.mark.parametrize(
    "folder", ["-Users-jdoe-work", "-home-jdoe-proj", "C--Users-jdoe-work", "/home/jdoe/work"]
)
def test_a_user_in_the_name_of_a_state_does_not_leave(folder):
    """Folders of Claude Code are named after paths; read from such a folder, a state is named after it."""
    asked = [{"role": "user", "content": "ask jdoe, set --home-dir, -home-page"}]
    state = TraceState(f"{folder}/abc:12", asked, Action("x"), source=f"{folder}/abc.jsonl:12")
    with pytest.raises(NotCleanError):
        assert_clean([state])
    clean = Redactor().state(state)
    assert "jdoe" not in json.dumps([clean.state_id, clean.source, list(clean.messages)])
    assert clean.state_id.endswith("/abc:12") and "--home-dir, -home-page" in clean.messages[0]["content"]
    assert_clean([clean])
