"""The page of a replay: everything is on it, nothing on it runs, and nobody is asked."""

import json
import re
import shutil
import subprocess
import tracemalloc
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay_command import folder_of, replay, server  # noqa: F401

from composer_nb.drills.planted import planted
from composer_nb.replay.ledger import Ledger
from composer_nb.replay.markup import (
    Markup,
    as_json,
    difference,
    joined,
    message_block,
    readable,
    tag,
    text_block,
)
from composer_nb.replay.plan import pairs_of, read_plan, recorded, teachers_of
from composer_nb.replay.protocol import TeacherReply
from composer_nb.replay.viewer import write_page
from composer_nb.traces import Action, ToolCall, ToolFailure, TraceState, load_states, save_states

READ = {"type": "function", "function": {"name": "read", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}  # fmt: skip
ASKED = [{"role": "user", "content": "What do my notes say?"}]
ELEMENTS = set("html head meta title style body h1 h2 h3 h4 p a b bdi span div code article section nav main "
               "table caption thead tbody tr th td fieldset legend input label details summary ol li del "
               "ins".split())  # fmt: skip
ATTRIBUTES = set("lang charset http-equiv content name class id href dir tabindex scope for type checked "
                 "data-label aria-label aria-labelledby aria-hidden".split())  # fmt: skip
HOSTILE = [
    "</script><script>alert(1)</script>", "</style><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="', "' onfocus='alert(1)' autofocus='",
    "<a href='javascript:alert(1)'>here</a>", "javascript:alert(1)", "<!-- ", "]]>",
    "<svg/onload=alert(1)>", "</div></section></main></body></html><iframe src=//example.org>",
    "&lt;script&gt; &amp;#60;", "half \ud800 of a pair", "a\x00b\x1b[31m", "\u202egnirts\u2066",
    "\U000e0041\u200b\ufeff", "\r\n\x85\u2028", "{{7*7}} ${x} %s {0}", "<textarea><title><xmp><plaintext>",
    "̀" * 500, "word " * 200_000,
]  # fmt: skip


def call(path: str = "a", name: str = "read") -> Action:
    return Action("", (ToolCall(name, {"path": path}),))


def made(
    place: Path, states: list[TraceState], answers: dict, names: tuple = ("t1", "t2", "t3"), **more: object
) -> Path:
    """A plan whose ledger holds `answers[state_id][teacher]`: an action, a reason for none, or a
    whole reply.
    """
    price = {
        "date": "2026-11-01",
        "source": "invented",
        "models": dict.fromkeys(names, {"prompt": 1e-6, "completion": 1e-6}),
    }
    (place / "prices.json").write_text(json.dumps(price))
    save_states(states, place / "states.jsonl")
    plan = {"states": "states.jsonl", "ceiling_usd": 1.0, "prices": "prices.json"} | more
    plan["teachers"] = [{"model": name, "base_url": "http://127.0.0.1:1/v1"} for name in names]
    (place / "plan.yaml").write_text(yaml.safe_dump(plan))
    teachers = {t.name: t for t in teachers_of(read_plan(place / "plan.yaml"), weights=False)}
    with Ledger(place / "replies.jsonl") as ledger:
        for state in states:
            for name, given_ in answers.get(state.state_id, {}).items():
                asked = teachers[name].request(state)
                ledger.request_sync(asked, 0.01, state.state_id)
                facts = {"cost_usd": 0.002, "model": name, "prompt_tokens": 7, "completion_tokens": 5}
                reply = TeacherReply(asked.key, name, given_, **facts) if isinstance(given_, Action) else (
                    TeacherReply(asked.key, name, None, "skipped", given_, cost_usd=0.0))  # fmt: skip
                ledger.reply_sync(reply)
    return place / "plan.yaml"


def page_of(plan: Path, **options: object) -> str:
    told = read_plan(plan)
    with Ledger(told.ledger, offline=True) as ledger:
        write_page(told, ledger, plan.with_name("trace.html"), **options)
    return plan.with_name("trace.html").read_bytes().decode("utf-8")


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails where they do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.elements, self.texts, self.style = [], [], [], ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self.open += [] if name in ("meta", "input") else [name]

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        if self.open and self.open[-1] == "style":
            self.style += text
        else:
            self.texts.append(text)

    def handle_comment(self, text):
        raise AssertionError(f"a comment: {text[:40]}")

    @property
    def text(self) -> str:
        return "".join(self.texts)


def check_harmless(page: str) -> Page:
    found = Page(page)
    assert {name for name, _ in found.elements} <= ELEMENTS
    assert {key for _, told in found.elements for key in told} <= ATTRIBUTES
    ids = [told["id"] for _, told in found.elements if "id" in told]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[a-z0-9-]+", one) for one in ids)
    assert {told["href"] for _, told in found.elements if "href" in told} <= {f"#{one}" for one in ids}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    policy = next(
        told["content"] for _, told in found.elements if told.get("http-equiv") == "Content-Security-Policy"
    )
    style = b64encode(sha256(found.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in found.style and "@import" not in found.style
    return found


def hostile_plan(place: Path, bad: str) -> Path:
    """A plan with one text in every field that a log, a teacher or the plan can fill."""
    arguments = {bad: bad, "path": [bad]}
    action = Action(bad, (ToolCall(bad, arguments, bad), ToolCall("read", bad)), bad)
    messages = [
        {"role": bad, "content": bad, "name": bad},
        {"role": "user", "content": [{"type": bad}, {"text": bad}]},
        {"role": "assistant", "content": bad,
         "tool_calls": [{"id": bad, "function": {"name": bad, "arguments": bad}}]},
        {"role": "assistant", "content": None, "tool_calls": [bad]},
    ]  # fmt: skip
    tools = [
        {
            "type": "function",
            "function": {"name": bad, "parameters": {"properties": {bad: {"type": "string"}}}},
        },
        READ,
    ]
    failures = tuple(ToolFailure(one, bad, kind) for one in action.tool_calls for kind in ("tool_error", bad))
    states = [
        TraceState(
            f"{n}{bad}",
            messages * n,
            action,
            [READ] if n == 2 else tools,
            failures,
            bad,
            source=bad,
            metadata={bad: bad},
        )
        for n in (1, 2)
    ]
    answers = {s.state_id: {"t1": call(bad), "t2": call(bad), bad: bad} for s in states}
    return made(place, states, answers, ("t1", "t2", bad), allow_same_vendor=True)


def json_kept(text: str) -> str:
    """What a JSON-lines file in UTF-8 can hold of a text: no half of a pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_from_a_log_becomes_an_element(tmp_path, bad):
    found = check_harmless(page_of(hostile_plan(tmp_path, json_kept(bad)), unredacted=True))
    assert readable(json_kept(bad)[:60]).split()[0] in found.text
    assert all(len(text) < 8 * 4000 for text in found.texts) and len("".join(found.texts)) < 400_000


def test_half_a_pair_in_a_file_of_states_is_shown_by_its_number(tmp_path):
    plan = made(tmp_path, [TraceState("s", ASKED, call("half"))], {})
    path = tmp_path / "states.jsonl"
    path.write_text(path.read_text().replace('"half"', r'"a\ud800b"'))
    assert "a⟨U+D800⟩b" in check_harmless(page_of(plan)).text
    (tmp_path / "answer").mkdir()  # and in a ledger, whose lines are ASCII
    plan = made(
        tmp_path / "answer",
        [TraceState("s", ASKED, call())],
        {"s": {"t1": Action("a\udfffb"), "t2": "\ud800"}},
    )
    text = check_harmless(page_of(plan)).text
    assert "a⟨U+DFFF⟩b" in text and "skipped: ⟨U+D800⟩" in text


@pytest.mark.browser
def test_a_browser_finds_the_same_elements(tmp_path):
    """All hostile texts at once, as Chromium repairs them: no script, no image, no handler."""
    page_of(hostile_plan(tmp_path, json_kept("\n".join(HOSTILE[:-1]))), unredacted=True)
    words = [
        shutil.which("chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*words, "--dump-dom", (tmp_path / "trace.html").as_uri()], capture_output=True, text=True, timeout=60
    )
    found = Page(done.stdout.strip())
    assert {name for name, _ in found.elements} <= ELEMENTS and {
        key for _, told in found.elements for key in told
    } <= ATTRIBUTES
    assert any(told.get("class", "").startswith("state") for _, told in found.elements)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=20))
def test_a_text_is_read_back_as_it_is_shown(text, value):
    found = Page(tag("p", text, tag("b", text), title=value))
    assert found.text == readable(text) * 2 and found.elements[0] == ("p", {"title": readable(value)})


def test_accents_pile_up_by_number_only():
    assert readable("e" + "\u0301" * 500).count("⟨U+0301⟩") == 500
    for text in (
        "é",
        "e\u0301\u0323",
        "\u05e9\u05b8\u05c1\u0591",
        "⚠\ufe0f" * 5,
        "────────",
        "👩\u200d💻" * 4,
        "नमस्ते",
    ):
        assert readable(text) == text


def test_markup_is_not_escaped_twice():
    assert joined(joined("<"), Markup("<b>")) == "&lt;<b>" and joined(tag("i", "&")) == "<i>&amp;</i>"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", " ", "\n", "<", "é"]), max_size=60),
    st.lists(st.sampled_from(["a", "b", " ", "<"]), max_size=60),
)
def test_a_difference_loses_no_word(one, other):
    one, other = "".join(one), "".join(other)
    sides = difference(one, other)
    assert [Page(f"<p>{side}</p>").text for side in sides] == [one, other]
    assert ("<del>" in sides[0] or "<ins>" in sides[1]) == (one != other)


def test_texts_with_nothing_in_common_are_marked_whole():
    one, other = "".join(f"a{i} " for i in range(900)), "".join(f"b{i} " for i in range(900))
    left, right = difference(f"same {one}end", f"same {other}end")
    assert left == f"same <del>{one.rstrip()}</del> end" and right.count("<ins>") == 1


def test_a_long_text_is_folded_cut_and_counted():
    block = text_block("line\n" * 300_000, 4000)
    assert "1,496,000 characters left out" in block and block.startswith("<details>") and len(block) < 5000
    assert text_block("short", 5) == '<div class="text" dir="auto">short</div>' and "left out" in text_block(
        "short", 4
    )


def test_calls_that_are_none_are_shown_as_they_are():
    for calls in (["x<y"], [{"function": {"arguments": "x<y"}}], "x<y", {"x<y": 1}):
        block, line = message_block({"role": "assistant", "tool_calls": calls}, 400)
        assert "calls that cannot be read" in block and "x&lt;y" in block and "x<y" in line


def test_everything_of_a_state_is_on_its_page(tmp_path):
    failed = ToolFailure(call("b").tool_calls[0], "No such file or directory: b")
    state = TraceState(
        "one/0",
        ASKED,
        Action("I look.", call("b").tool_calls, "it is b"),
        [READ],
        (failed,),
        "acme/m",
        source="f:3",
    )
    other = Action('{"name": "read", "arguments": {"path": "a"}}')  # the same call in another spelling
    plan = made(tmp_path, [state], {"one/0": {"t1": call("a"), "t2": other, "t3": "content_filter"}})
    page = page_of(plan)
    found = check_harmless(page)
    for text in ("one/0", "acme/m", "f:3", "What do my notes say?", "I look.", "it is b",
                 "No such file or directory: b", "file_not_found", "Reminder:", "skipped: content_filter",
                 "0.002000 USD", "7 tokens in, 5 out", "2 of 2 answers agree"):  # fmt: skip
        assert text in found.text, text
    assert found.text.count("answer 1, 2 of 2") == 2 and "<del>b</del>" in page and "<ins>a</ins>" in page
    row = re.search(r'<tr class="row pair error" id="i1">.*?</tr>', page)[0]
    assert [Page(cell).text for cell in re.findall("<td.*?</td>", row)[1:]] == [
        "2 of 3",
        "2",
        "pair",
        "✗ file_not_found",
    ]


@pytest.mark.parametrize(
    ("outcome", "answers", "more", "words"),
    [
        ("pair", {"t1": call("a"), "t2": call("a"), "t3": call("c")}, {},
         "2 of 3 answers agree, and the student did something else"),
        ("unlike", {"t1": Action("It says so."), "t2": Action("It says so.")}, {},
         "one side calls a tool and the other writes prose"),
        ("student_agrees", {"t1": call("b"), "t2": call("b")}, {}, "the student did the same"),
        ("tie", {"t1": call("a"), "t2": call("c")}, {"threshold": 1}, "More than one group of 1"),
        ("below_threshold", {"t1": call("a"), "t2": call("c")}, {},
         "1 of 2 answers agree, 1 stand against them; the plan asks for 2, and 1 more"),
        ("no_replies", {"t1": "timeout", "t2": call("a", "write")}, {},
         "No teacher gave an answer that counts"),
    ],
)  # fmt: skip
def test_the_reason_is_that_of_the_pairs(tmp_path, outcome, answers, more, words):
    plan = made(tmp_path, [TraceState("s", ASKED, call("b"), [READ])], {"s": answers}, **more)
    page = page_of(plan)
    assert words in Page(page).text and f"<code>{outcome}</code>" in page
    told, states = read_plan(plan), list(load_states(tmp_path / "states.jsonl"))
    with Ledger(told.ledger, offline=True) as ledger:
        pairs = pairs_of(told, states, recorded(states, teachers_of(told, weights=False), ledger))
    assert len(pairs) == (outcome == "pair") == page.count('<section class="state pair"')


def test_a_teacher_says_why_it_does_not_count(tmp_path):
    state = TraceState("s", ASKED, call("b"), [READ], model="gpt-5")
    answers = {"t1": call("a", "write"), "t2": Action(" ")}
    text = Page(page_of(made(tmp_path, [state], {"s": answers}, ("t1", "t2", "t3", "gpt-4")))).text
    assert "does not count: 'write' is not on offer" in text
    assert (
        "does not count: nothing was done" in text
        and "no reply yet" in text
        and "not asked: of the maker" in text
    )


def test_the_order_of_calls_counts_where_the_plan_says_so(tmp_path):
    a, b = call("a").tool_calls[0], call("c").tool_calls[0]
    answers = {"s": {"t1": Action("", (a, b)), "t2": Action("", (b, a))}}
    states = [TraceState("s", ASKED, Action("", (b, a)), [READ])]
    for ordered, same in ((False, "the same as answer 1"), (True, "the same as answer 2")):
        (tmp_path / str(ordered)).mkdir()
        assert same in Page(page_of(made(tmp_path / str(ordered), states, answers, ordered=ordered))).text


def test_messages_of_an_earlier_state_are_links(tmp_path):
    more = [*ASKED, {"role": "assistant", "content": "I look."}]
    states = [
        TraceState("a", ASKED, call()),
        TraceState("b", more, call()),
        TraceState("c", [{"role": "user", "content": "Else?"}], call()),
    ]
    page = page_of(made(tmp_path, states, {}))
    talks = re.findall(r'<details class="talk">.*?</ol>', page)
    assert 'href="#s1m1"' in talks[1] and 'id="s2m2"' in talks[1] and "(2, 1 of them new)" in talks[1]
    assert 'id="s3m1"' in talks[2] and "href" not in talks[2]


def test_equal_input_gives_equal_bytes_without_paths(tmp_path):
    pages = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        states = [TraceState("s", ASKED, call("b"), [READ])]
        pages.append(page_of(made(tmp_path / name, states, {"s": {"t2": call(), "t1": call()}})))
    assert pages[0] == pages[1] and str(tmp_path) not in pages[0]


def test_a_limit_counts_what_it_leaves_out_and_memory_does_not_grow(tmp_path):
    states = [
        TraceState(str(i), [{"role": "user", "content": f"{i}" + "x" * 1_000_000}], call()) for i in range(30)
    ]
    plan = read_plan(made(tmp_path, states, {}))
    del states
    tracemalloc.start()
    with Ledger(None) as ledger:
        report = write_page(plan, ledger, tmp_path / "trace.html", limit=25, unredacted=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.states, report.left_out, report.missing) == (25, 5, 75) and peak < 15e6
    page = (tmp_path / "trace.html").read_text()
    assert "25 states. 5 more are left out." in Page(page).text and "996,001 characters left out" in page
    with pytest.raises(ValueError, match="limit is 0"):
        write_page(plan, Ledger(None), tmp_path / "trace.html", limit=0)


def test_a_page_is_whole_or_not_there(tmp_path):
    plan = made(tmp_path, [TraceState("s", ASKED, call())] * 2, {})
    with pytest.raises(ValueError, match="duplicate state id 's'"):
        page_of(plan, limit=1)
    save_states([TraceState("s", ASKED, call())], path := tmp_path / "states.jsonl")
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match="states.jsonl:2 is not a state"):
        page_of(plan)
    assert not [one for one in tmp_path.iterdir() if "html" in one.name]


def test_no_hint_has_its_reason(tmp_path):
    kinds = {"user rejected it": "errors of this kind are no mistakes", "strange": "no template has one"}
    for number, (message, why) in enumerate(kinds.items()):
        state = TraceState("s", ASKED, call(), [READ], (ToolFailure(call().tool_calls[0], message),))
        (tmp_path / str(number)).mkdir()
        assert f"No hint: {why}." in Page(page_of(made(tmp_path / str(number), [state], {}))).text


def test_no_states_are_a_page_too(tmp_path):
    assert "0 states." in check_harmless(page_of(made(tmp_path, [], {}))).text


def test_deep_arguments_are_shown():
    value: dict = {}
    for _ in range(300):
        value = {"a": value}
    assert as_json(value).count("{") == 301


def test_the_command_shows_what_pairs_makes_and_asks_nobody(tmp_path, server):  # noqa: F811
    plan, out = folder_of(tmp_path, server.base_url), tmp_path / "trace.html"
    code, said, why = replay("view", plan, "--out", out)
    assert code == 3 and "18 questions have no reply yet" in why and "6 states, 0 pairs" in said
    assert not server.requests() and not (tmp_path / "replies.jsonl").exists()
    assert replay("run", plan, "--pay")[0] == 0
    code, said, why = replay("view", plan, "--out", out)
    assert (
        (code, why) == (0, "")
        and "6 states, 3 pairs, 3 with an error" in said
        and server.requests().total() == 18
    )
    assert check_harmless(out.read_text()).text.count("answer 1, 2 of 3") == 12
    assert "6 states, 3 left out" not in said
    code, said, _ = replay("view", plan, "--out", out, "--states", 2, "--text", 10)
    assert (
        code == 0
        and "2 states, 4 left out (--states shows more)" in said
        and "characters left out" in out.read_text()
    )
    assert replay("view", plan, "--states", 0)[0] == 2


def test_states_that_were_not_redacted_are_refused(tmp_path, server):  # noqa: F811
    plan, out = folder_of(tmp_path, server.base_url, 1), tmp_path / "trace.html"
    plan.write_text(yaml.safe_dump(yaml.safe_load(plan.read_text()) | {"states": "states.jsonl"}))
    code, _, why = replay("view", plan, "--out", out)
    assert (
        code == 1
        and "would be shown with what redaction replaces" in why
        and "mary" not in why
        and not out.exists()
    )
    code, _, why = replay("view", plan, "--out", out, "--unredacted")
    assert (
        code == 3
        and "nobody checked states and answers" in why
        and "not checked for secrets" in out.read_text()
    )


SECRET = {row.family: row for row in planted("token", "personal")}


@pytest.mark.parametrize("family", SECRET)
@pytest.mark.parametrize("place", ["text", "thinking", "arguments", "name", "reason"])
def test_answers_with_a_secret_are_refused(tmp_path, family, place):
    said = SECRET[family].text
    answer = {
        "text": Action(said), "thinking": Action("ok", (), said),
        "arguments": Action("", (ToolCall("read", {"a": [said]}),)),
        "name": Action("", (ToolCall(said, {}),)), "reason": said,
    }[place]  # fmt: skip
    state = TraceState("s/1", [{"role": "user", "content": "hi"}], Action("ok"))
    plan = made(tmp_path, [state], {"s/1": {"t1": Action("fine"), "t2": answer}}, ("t1", "t2"))
    with pytest.raises(
        ValueError,
        match=r"^an answer to state 's/1' would be shown with what redaction replaces \(.* left at t2\.",
    ) as caught:
        page_of(plan)
    assert SECRET[family].secret not in str(caught.value) and not plan.with_name("trace.html").exists()
    assert Page(page_of(plan, unredacted=True))
    plan.write_text(plan.read_text() + "personal: false\n")
    if family == "personal":
        assert Page(page_of(plan))
    else:
        with pytest.raises(ValueError, match="an answer to state"):
            page_of(plan)


def test_no_file_of_the_replay_is_overwritten(tmp_path, server):  # noqa: F811
    plan = folder_of(tmp_path, server.base_url, 1)
    for name in ("replay.yaml", "clean.jsonl", "replies.jsonl", "pairs.jsonl"):
        code, _, why = replay("view", plan, "--out", tmp_path / name)
        assert code == 1 and why.startswith("composer-nb replay view: ") and "is a file of this replay" in why
    code, _, why = replay("view", tmp_path / "none.yaml")
    assert code == 1 and why.startswith("composer-nb replay view: ") and "none.yaml" in why
