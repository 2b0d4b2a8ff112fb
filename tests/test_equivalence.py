"""When two actions of a coding agent are the same: commands, edits, arguments, and where a state
says the agent works.
"""

import json
import shlex
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.drills import equivalence
from composer_nb.drills.equivalence import FOLDER, SEEN, cases, edit, found_by_a_reader, patch, sh
from composer_nb.redaction import Redactor
from composer_nb.replay import agent_tools
from composer_nb.replay.actions import canonical_action, same_action, speller
from composer_nb.replay.commands import KNOWN, arranged, options, relative
from composer_nb.replay.consensus import consensus
from composer_nb.replay.edits import Change, Seen, changes_of, edit_form, files_seen, numbered, patched
from composer_nb.replay.shell import DEEPEST, LONGEST, command_form, words_form
from composer_nb.traces import Action, ToolCall, TraceState, ingest

WHERE = {"folder": FOLDER, "seen": {path: Seen(text) for path, text in SEEN.items()}}
WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
PIECES = ["ls", "-la", "&&", "||", "|", ";", "\n", "'a b'", '"x $Y"', "$(ls)", "`a`", "<<EOF", "EOF", ">",
          "2>&1", "<<<", "(", ")", "{", "}", "if", "then", "fi", "for", "in", "do", "done", "#x", "\\", "*",
          "~", "A=1", "git", "add", "cd", FOLDER, "-n", "5", "grep", "-e", "--", "é", "\0", "[[", "]]",
          "bash", "-c"]  # fmt: skip


@pytest.mark.parametrize("case", [*cases(), *found_by_a_reader()], ids=lambda case: case.name[:80])
def test_a_pair_is_judged_as_a_developer_does_or_kept_apart(case):
    """What differs is never taken for the same; of what is the same, an edit of an unread file
    may be missed.
    """
    found = same_action(case.one, case.other, **WHERE)
    unread = case.group == "edits" and "other.py" in case.name
    assert found == case.same or (case.same and unread)


def test_few_pairs_are_missed():
    right = [same_action(case.one, case.other, **WHERE) == case.same for case in cases()]
    assert sum(right) >= 0.9 * len(right)


# Commands


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([" ", "  ", ""])), max_size=10))
def test_any_text_has_a_form_that_is_json_and_blanks_around_it_do_not_matter(pieces):
    text = "".join(piece + gap for piece, gap in pieces)
    form = command_form(text, FOLDER)
    assert json.loads(json.dumps(form)) == form
    assert form == command_form(f"  {text}" if text.endswith("\\") else f"  {text}  ", FOLDER)


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5))
def test_quoted_words_are_the_words(words):
    """What `shlex` quotes is read back as those words, whatever they hold; a list of words is a
    command without a shell.
    """
    typed = command_form(shlex.join(["prog", *words]))
    assert typed == ["run", "prog", *words] == words_form(["prog", *words])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["-a", "-l", "-R", "--all", "-t"]), max_size=4),
    st.sampled_from(["src", "a b", "-"]),
)
def test_options_of_a_known_command_may_stand_anywhere(options, path):
    one = shlex.join(["ls", *options, path])
    other = shlex.join(["ls", path, *reversed(options)])
    assert command_form(one) == command_form(other) != command_form(f"{one} more")


@pytest.mark.parametrize(
    "one, other",
    [
        ("grep -e -n x", "grep -n -e x"),  # the value of -e is -n
        ("head -n 5 -c 3 a", "head -n 3 -c 5 a"),
        ("grep -A 3 x -- -y", "grep -A 3 x y"),
        ("ls --sort=time", "ls --sort=size"),
        ("rm -- -f", "rm -f"),
        ("git commit -m a -m b", "git commit -m b -m a"),
        ("git commit --amend", "git commit"),
        ("bash -c 'a b'", "a"),
        ("A=1 make", "make"),
        ("A=1; make", "A=1 make"),
        ("echo ''", "echo"),
        ("a | b && c", "a && b | c"),
        ("(cd src; ls)", "cd src; ls"),
        ("cat <<'E'\n$x\nE", "cat <<E\n$x\nE"),
        ("mv a b/", "mv a b"),
        ("cd src && cat /srv/shop/a.py", "cd src && cat a.py"),
        ("cd src && cat a.py", "cat a.py"),
        ("cd src; cat a.py", "cd src && cat a.py"),
        ("pytest 2>&1 | tail -5", "pytest | tail -5"),
        ("pytest 2>&1 > log", "pytest > log"),
        ("mkdir a/{b,c}", "mkdir 'a/{b,c}'"),
        ("cat a b | grep x", "grep x a"),
        ("cat a | grep x b", "grep x a b"),
        ("cat a | wc -l", "wc -l a"),
        ("sed -n '2,5p' a", "head -n 5 a"),
        ("sed -n '1,5p' a b", "head -n 5 a"),
        ("env", "env A=1"),
        ("cat <<'E' > f\n$x\nE", "cat <<E > f\n$x\nE"),
        ('git commit -m "$(cat <<E\n$x\nE\n)"', "git commit -m '$x'"),
        ("grep -F a.b f", "grep -f a.b f"),
        ("npm install --save-dev x", "npm install x"),
        ("curl -d a=1 url -d b=2", "curl -d b=2 url -d a=1"),
        (f"cd {FOLDER}/src && ls", "ls"),
        (f"cd {FOLDER}; cd src; ls", "ls"),
        (f"cd {FOLDER} && cd src && a; b", "a; b"),
    ],
)
def test_what_a_shell_tells_apart_stays_apart(one, other):
    assert command_form(one, FOLDER) != command_form(other, FOLDER)


def test_options_end_where_two_hyphens_stand_and_a_value_is_not_an_option():
    assert command_form("grep -e -n x") == command_form("grep -e '-n' x")
    assert command_form("cat -- a") == command_form("cat a") != command_form("cat -- -a")
    assert command_form("git diff -- a") != command_form("git diff a")
    assert command_form("head -n") == ["run", "head", "-n"]  # its value is missing: as it is written


@pytest.mark.parametrize(
    "one, other",
    [
        ("cd src && cat a.py", "cd src&&cat ./a.py"),
        (f"cd {FOLDER}/src && ls", "cd src && ls ."),
        (f"cd src && cd .. && ls {FOLDER}", f"cd src && cd ../ && ls {FOLDER}"),
        ("pytest -q 2>&1", "pytest -q"),
        ("a && b 2>&1; c", "a && b; c 2>&1"),
        ("mkdir -p a/{b,c}/d", "mkdir -p a/c/d a/b/d"),
        ("cat a | grep -n x | head -3", "grep -n x a | head -n 3"),
        ("sed -n 1,5p a", "head -5 a"),
        ("env A=1 B='x y' cmd", 'A=1 B="x y" cmd'),
        ("cat > f <<'EOF'\nhi\nEOF", "cat <<END >f\nhi\nEND"),
        ("git commit -m \"$(cat <<'EOF'\nFix $x\n\nMore.\nEOF\n)\"", "git commit -m 'Fix $x\n\nMore.'"),
        (
            "source v/bin/activate && pip install -r r.txt",
            ". v/bin/activate && python -m pip install --requirement r.txt",
        ),
        ("git switch -c x", "git checkout -b x"),
        ('echo "${HOME}/a"', 'echo "$HOME/a"'),
        ("cat <HOME>/shop/a.py", "cat '<HOME>/shop/a.py'"),
    ],
)
def test_what_a_shell_throws_away(one, other):
    assert command_form(one, FOLDER) == command_form(other, FOLDER) != one


def test_a_tool_that_is_told_a_folder_runs_there():
    def ask(command, **more):
        return Action(tool_calls=(ToolCall("run_shell_command", {"command": command, **more}),))

    told = ask("ls ./a", directory="src", description="Look.")
    assert same_action(told, ask("cd src && ls a"), folder=FOLDER)
    assert same_action(ask("cd a && ls", directory="src"), ask("cd src/a && ls"), folder=FOLDER)
    assert same_action(ask("ls", directory=FOLDER), ask("ls"), folder=FOLDER)
    assert not same_action(told, ask("ls ./a", directory="lib"), folder=FOLDER)
    assert not same_action(told, ask("ls ./a"), folder=FOLDER)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_table_is_of_one_piece(name):
    """No option is both with and without a value, and each short form is an option."""
    known = KNOWN[name]
    assert not known.flags & known.values and not set(known.names) & (known.flags | known.values)
    letters = {
        *known.names.values(),
        *({known.digits} - {""}),
        *(one for group in known.rivals for one in group),
    }
    assert letters <= known.flags | known.values
    assert arranged(name.split()) == name.split()


def test_options_by_their_spelling():
    known = options("a", "n", "all=a lines=n stat author=")
    assert (
        known.flags == {"a", "stat"}
        and known.values == {"n", "author"}
        and known.names == {"all": "a", "lines": "n"}
    )


@pytest.mark.parametrize("name, right", [("blind", 90), ("unseen", 85)])
def test_pairs_of_somebody_who_did_not_know_the_rule(name, right):
    """Some that are the same are kept apart; none that differs is taken for the same."""
    listed, where = equivalence.outsiders(name)
    found = [same_action(case.one, case.other, **where) for case in listed]
    assert not any(same and not case.same for same, case in zip(found, listed))
    assert sum(same == case.same for same, case in zip(found, listed)) >= right


def test_a_cd_and_redirections_of_a_list():
    here = command_form("FOO=1 pytest -q 2>&1 | tail -n 5", FOLDER)
    assert command_form(f"cd {FOLDER} && FOO=1 pytest -q 2>&1 | tail -5", FOLDER) == here
    assert command_form(f"cd {FOLDER}/ ; FOO=1 pytest -q 2>&1 | tail -5", FOLDER) == here
    assert command_form(f"cd {FOLDER}", FOLDER) == ["run", "cd", FOLDER]
    assert command_form("a && b > c")[-1][0] == "redirected_statement"


def test_long_and_deep_commands_stay_texts_and_cost_little():
    deep, long = "(" * 2000 + "ls" + ")" * 2000, "ls " + "a" * LONGEST
    since = time.perf_counter()
    assert command_form(deep) == deep and command_form(long) == long
    assert isinstance(command_form("(" * (DEEPEST // 4) + "ls" + ")" * (DEEPEST // 4)), list)
    assert time.perf_counter() - since < 2
    nested = "ls"
    for _ in range(8):
        nested = f"bash -c {shlex.quote(nested)}"
    assert command_form(nested) == ["run", "ls"]
    since, nested = time.perf_counter(), "ls"
    for _ in range(9):
        nested = f"cd x; bash -c {shlex.quote(nested)}"
    assert command_form(nested)[0] == "do" and time.perf_counter() - since < 1


def test_paths():
    assert relative("") == "" and relative("/") == "/" and relative("//a") == "/a"
    assert relative("../x", FOLDER) == "../x" and relative(f"{FOLDER}/../x", FOLDER) == "/srv/x"
    assert relative("/a", "/") == "a"


# Edits


@settings(deadline=None)
@given(st.text("ab\n", min_size=1, max_size=30), st.data())
def test_context_around_an_edit_does_not_matter_where_the_file_is_known(text, data):
    """The same change with any piece of the file around it leaves the same file."""
    first = data.draw(st.integers(0, len(text) - 1))
    last = data.draw(st.integers(first + 1, len(text)))
    seen, forms = {"f": Seen(text)}, set()
    for low, high in ((0, len(text)), (first, last)):
        old = text[low:high]
        if text.count(old) != 1 or text.find(old) != low:
            return
        new = text[low:first] + "X" + text[last:high]
        forms.add(json.dumps(edit_form([Change("f", old, new)], seen)))
    assert len(forms) == 1


def test_changes_to_a_file_are_made_one_after_another():
    steps = [Change("f", "a", "b"), Change("f", "b c", "d")]
    assert edit_form(steps, {"f": Seen("a c")}) == edit_form([Change("f", None, "d\n")], {})
    assert edit_form(steps, {}) == {"f": [["a", "b"], ["b c", "d"]]}
    assert edit_form([Change("f", "a", "b", every=True)], {"f": Seen("a a", whole=False)}) == {
        "f": [["a", "b", "every"]]
    }
    assert edit_form([Change("f", None, None)], {"f": Seen("a")}) == {"f": "gone"}


TWICE = "def a():\n    x = 1\n\ndef b():\n    x = 1\n"


def in_state(text, whole=True):
    return {"folder": FOLDER, "seen": {"f.py": Seen(text, whole)}}


def hunk(*lines, at="@@"):
    return patch("*** Update File: f.py", at, *lines)


def test_the_same_hunk_in_two_places_is_two_edits():
    one, other, nowhere = (
        hunk("-    x = 1", "+    x = 2", at=at) for at in ("@@ def a():", "@@ def b():", "@@")
    )
    for where in ({}, in_state(TWICE), in_state(TWICE, whole=False)):
        assert not same_action(one, other, **where) and not same_action(one, nowhere, **where)
    nested = [patch("*** Update File: f.py", *at, "-    x = 1", "+    x = 2") for at in
              (["@@ class A", "@@ def f"], ["@@ class B", "@@ def f"], ["@@ def f"])]  # fmt: skip
    assert len({canonical_action(act) for act in nested}) == 3


def test_an_anchor_that_only_says_what_the_file_says_does_not_matter():
    once = in_state("def a():\n    x = 1\n")
    here, there = hunk("-    x = 1", "+    x = 2", at="@@ def a():"), hunk("-    x = 1", "+    x = 2")
    assert same_action(here, there, **once) and same_action(here, edit("x = 1", "x = 2", path="f.py"), **once)
    assert not same_action(
        hunk("-    x = 1", "+    x = 2", at="@@ def z():"), there, **once
    )  # such a patch fails
    assert not same_action(
        hunk("-x = 1", "+x = 2"), edit("x = 1", "x = 2", path="f.py"), **once
    )  # no whole line


def test_a_patch_of_a_file_seen_in_part_is_compared_by_its_lines():
    part = in_state("    x = 1\n    y = 2\n", whole=False)
    more = hunk("-    x = 1", "+    x = 2", "     y = 2")
    assert not same_action(hunk("-    x = 1", "+    x = 2"), more, **part)


def test_a_patch_is_made_where_its_tool_is_told_to_run():
    delete = "*** Begin Patch\n*** Delete File: {}\n*** End Patch"
    there = equivalence.codex(
        "apply_patch", delete.format("a"), workdir="src", timeout_ms=5, justification="Old."
    )
    assert same_action(there, equivalence.codex("apply_patch", delete.format("src/a")), folder=FOLDER)


def test_everywhere_in_a_part_is_not_once():
    part = in_state("x = 1\n", whole=False)
    once, every = edit("x = 1", "x = 2", path="f.py"), edit("x = 1", "x = 2", path="f.py", replace_all=True)
    assert not same_action(once, every, **part) and same_action(once, every, **in_state("x = 1\n"))


@pytest.mark.parametrize("lines", [
    ["*** Update File: a", "+only new"], ["*** Update File: a", "*** Move to: b", "-x", "+y"],
    ["*** Add File: a", "x"], ["*** Delete File: a", "-x"], ["*** Rename File: a"], ["x"],
])  # fmt: skip
def test_a_patch_that_cannot_be_read_is_compared_as_it_is(lines):
    one = patch(*lines)
    assert patched(one.tool_calls[0].arguments["input"]) is None
    assert same_action(one, patch(*lines)) and not same_action(one, patch(*lines, "*** Add File: z", "+z"))


def test_a_patch_of_many_files():
    text = patch(
        "*** Add File: b",
        "+x",
        "*** Update File: a",
        "@@",
        "-1",
        "+2",
        "@@ f",
        "-3",
        "+4",
        "*** Delete File: c",
    )
    assert [tuple(change) for change in changes_of(text.tool_calls[0])] == [
        ("b", None, "x\n", False, None), ("a", "1\n", "2\n", False, ()), ("a", "3\n", "4\n", False, ("f",)),
        ("c", None, None, False, None),
    ]  # fmt: skip
    in_words = ToolCall("shell", {"command": ["apply_patch", text.tool_calls[0].arguments["input"]]})
    assert changes_of(in_words) == changes_of(text.tool_calls[0])


@pytest.mark.parametrize("arguments", [
    {"file_path": "a", "old_string": 1, "new_string": "x"}, {"file_path": "a", "old_string": "x"},
    {"old_string": "x"}, {"file_path": "a", "edits": "x"}, {"file_path": "a", "edits": ["x"]}, "no object",
])  # fmt: skip
@pytest.mark.parametrize("tool", ["Edit", "MultiEdit"])
def test_an_edit_that_is_not_whole_is_no_change(tool, arguments):
    call = ToolCall(tool, arguments)
    assert changes_of(call) is None
    assert same_action(Action(tool_calls=(call,)), Action(tool_calls=(call,)))


def reading(text, path="cart.py", **more):
    asks = {
        "id": "r",
        "type": "function",
        "function": {"name": "Read", "arguments": {"file_path": path, **more}},
    }
    told = "\n".join(f"{n:6}→{line}" for n, line in enumerate(text.splitlines(), 1))
    return [
        {"role": "assistant", "content": "", "tool_calls": [asks]},
        {"role": "tool", "tool_call_id": "r", "content": told},
    ]


def doing(call, result="done"):
    asks = {"id": "w", "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [asks]},
        {"role": "tool", "tool_call_id": "w", "content": result},
    ]


def test_files_are_followed_through_a_conversation():
    text = SEEN["cart.py"]
    messages = reading(text, f"{FOLDER}/cart.py") + doing(edit("s = 0", "s = 1").tool_calls[0])
    assert files_seen(messages, FOLDER) == {"cart.py": Seen(text.replace("s = 0", "s = 1"))}
    nowhere = edit("gone", "x").tool_calls[0]
    assert files_seen(messages + doing(nowhere, "Error: not found"), FOLDER) == files_seen(messages, FOLDER)
    assert files_seen(messages + doing(nowhere), FOLDER) == {}  # what was seen cannot have been the file
    part = reading("def total(items):", "cart.py", limit=1)
    assert not files_seen(part)["cart.py"].whole and files_seen(messages + part, FOLDER)["cart.py"].whole
    assert files_seen(doing(ToolCall("Write", {"file_path": "n", "content": "x"}))) == {"n": Seen("x")}


WROTE = ToolCall("Write", {"file_path": "cart.py", "content": "x\n"})


@pytest.mark.parametrize("result", [
    "Error: no write access.", "<tool_use_error>String to replace not found in file.</tool_use_error>",
    "No replacement was performed.",
    "The user doesn't want to proceed with this tool use.",
])  # fmt: skip
def test_an_edit_that_failed_has_changed_nothing(result):
    messages = reading(SEEN["cart.py"]) + doing(WROTE, result)
    assert files_seen(messages) == {"cart.py": Seen(SEEN["cart.py"])}


@pytest.mark.parametrize(
    "result", ["", "Hm.", "Error: File has been modified since read, either by the user or by a linter."]
)
def test_after_an_edit_of_unknown_result_the_file_is_not_known(result):
    assert files_seen(reading(SEEN["cart.py"]) + doing(WROTE, result)) == {}


def test_an_error_that_is_marked_as_one_counts_whatever_it_says():
    failed = doing(WROTE, "done")
    failed[-1]["is_error"] = True
    assert files_seen(reading(SEEN["cart.py"]) + failed) == {"cart.py": Seen(SEEN["cart.py"])}


@pytest.mark.parametrize("call, known", [
    (ToolCall("Bash", {"command": "sed -i s/0/1/ cart.py"}), False),
    (ToolCall("Bash", {"command": "git checkout cart.py"}), False),
    (ToolCall("Bash", {"command": "ls > cart.py"}), False),
    (ToolCall("Bash", {"command": "cat $(rm cart.py)"}), False),
    (ToolCall("Bash", {"command": "find . -delete"}), False),
    (ToolCall("Bash", {"command": "grep -n s cart.py | head -5; git status && pytest -q 2>&1"}), True),
    (ToolCall("shell", {"command": ["bash", "-lc", "ls -la"]}), True),
    (ToolCall("shell", {"command": ["bash", "-lc", "rm -r ."]}), False),
    (ToolCall("Grep", {"pattern": "s"}), True),
    (ToolCall("TodoWrite", {"todos": []}), True),
    (ToolCall("NotebookEdit", {"notebook_path": "n.ipynb"}), False),
    (ToolCall("somebodys_tool", {}), False),
])  # fmt: skip
def test_what_may_have_changed_a_file_forgets_it(call, known):
    assert bool(files_seen(reading(SEEN["cart.py"]) + doing(call))) == known


def test_numbered_lines():
    reminder = "<system-reminder>\nMind.\n3→c\n</system-reminder>"
    assert numbered("no numbers") is None and numbered(f"1→a\n2→b\n\n{reminder}") == Seen("a\nb\n")
    for cut in ("... [400 lines omitted] ...", "A remark.", "x\n3→c"):
        assert numbered(f"1→a\n2→b\n{cut}") == Seen("a\nb\n", whole=False)
    assert numbered("9" * 5000 + "→x") is None


def test_what_is_read_again_counts():
    """Other lines than those that are known end the knowledge, and so does a file that is not
    there any more.
    """
    whole = reading(SEEN["cart.py"])
    changed = reading("x", "cart.py", limit=1)
    assert files_seen(whole + reading("def total(items):", "cart.py", limit=1)) == files_seen(whole)
    assert files_seen(whole + changed) == {}
    changed[-1]["content"] = "File does not exist."
    assert files_seen(whole + changed) == {}


@pytest.mark.parametrize("result, known", [
    ("The file cart.py has been updated. Here's the result", True),
    ("PreToolUse:Edit hook blocking error: not until tests are updated", False),
    ("Found 2 matches of the string to replace. String: status = 'done'", False),
    ('{"output":"apply_patch verification failed: ... # done","metadata":{"exit_code":1}}', False),
    ('{"output":"Success. Updated the following files:\\nM cart.py","metadata":{"exit_code":0}}', True),
    ("The file cart.py has been updated. The user modified your proposed changes before accepting them.",
     False),
    ("<tool_use_error>File has been unexpectedly modified. Read it again.</tool_use_error>", False),
])  # fmt: skip
def test_only_what_says_that_it_worked_is_followed(result, known):
    assert (files_seen(reading(SEEN["cart.py"]) + doing(WROTE, result)) == {"cart.py": Seen("x\n")}) == known


def test_calls_without_ids_and_calls_without_results():
    messages = reading(SEEN["cart.py"])
    for message in messages:
        message["tool_calls" if "tool_calls" in message else "tool_call_id"] = (
            [{**message["tool_calls"][0], "id": ""}] if "tool_calls" in message else ""
        )
    assert files_seen(messages) == {}
    cut = doing(ToolCall("Bash", {"command": "sed -i s/0/1/ cart.py"}))[:1]
    assert (
        files_seen(
            reading(SEEN["cart.py"])
            + cut
            + [{"role": "user", "content": "stop"}, {"role": "assistant", "content": "ok"}]
        )
        == {}
    )


def test_parallel_calls_that_write_keep_their_order():
    def both(*calls):
        return Action(tool_calls=tuple(act.tool_calls[0] for act in calls))

    ran, mended, other = sh("pytest"), edit("s = 0", "s = 1"), edit("a", "b", path="other.py")
    one, two = (equivalence.call("Write", file_path="f", content=text) for text in "ab")
    for a, b in ((mended, ran), (one, two), (sh("git add ."), sh("git commit -m x"))):
        assert not same_action(both(a, b), both(b, a), **WHERE)
    for a, b in ((mended, other), (ran, sh("ls")), (equivalence.call("f", x=1), equivalence.call("f", x=2))):
        assert same_action(both(a, b), both(b, a), **WHERE)


def test_hunks_are_looked_for_in_the_text_as_it_was():
    whole = in_state("a = 1\nb = 1\nc = 1\n")
    hunks = [["-a = 1", "+a = 2"], ["-c = 1", "+c = 2"], ["-a = 2", "-b = 1", "+z = 1"]]

    def act(*numbers):
        return patch("*** Update File: f.py", *(line for n in numbers for line in ("@@", *hunks[n])))

    assert not same_action(act(0, 1), act(1, 0), **whole)
    assert not same_action(act(0, 2), hunk("-a = 1", "-b = 1", "+z = 1"), **whole)


def test_a_new_file_is_not_one_that_is_written_over():
    for one in (
        edit("", "x", path="n"),
        equivalence.call("str_replace_editor", command="create", path="n", file_text="x"),
    ):
        assert not same_action(one, equivalence.call("Write", file_path="n", content="x"))


def test_odd_conversations_end_nothing():
    shell = doing(ToolCall("shell", {"command": []}))
    assert (
        files_seen(shell) == {}
        and files_seen([{"role": "tool", "tool_call_id": ["x"], "content": "y"}]) == {}
    )
    assert command_form("cd .\n" * 2500 + "ls") == ["run", "ls"]
    since = time.perf_counter()
    command_form("echo a" + " " * 16000 + "b")
    assert time.perf_counter() - since < 1
    huge = Action(tool_calls=(ToolCall("f", {"a": 10**5000}),))
    assert canonical_action(
        huge, [{"name": "f", "parameters": {"properties": {"a": {"type": {"x": 1}}}}}, "a text"]
    )


def test_a_patch_of_many_files_costs_little():
    text = patch(*(line for n in range(8000) for line in (f"*** Add File: f{n}", "+x")))
    since = time.perf_counter()
    assert canonical_action(text).count("file") == 8000 and time.perf_counter() - since < 2


# Arguments and states


def test_odd_arguments_have_a_spelling():
    """What a schema or a model got wrong ends no replay, and stays apart from what it is not."""
    tool = {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "string", "required": True}}, "required": True},
    }
    acts = [ToolCall("f", {"a": "x"}), ToolCall("f", {1: "x", "a": 2}), ToolCall(None, {"a": "x"}),
            ToolCall("Bash", {"command": "ls", "run_in_background": b"1"}),
            ToolCall("Grep", {"-i": {1, 2}})]  # fmt: skip
    told = [canonical_action(Action(tool_calls=(call,)), [tool]) for call in acts]
    assert len(set(told)) == len(acts)


@pytest.mark.parametrize("depth", [20, 49, 51, 350, 20_000])
def test_deep_arguments_are_told_apart(depth):
    def nested(core):
        for _ in range(depth):
            core = {"a": [core]}
        return Action(tool_calls=(ToolCall("f", core),))

    one, other, again = nested(1), nested(2), nested(1)
    assert same_action(one, again) and not same_action(one, other)
    if depth < 500:  # as deep as JSON can be read and written
        state = TraceState("s", [{"role": "user", "content": "Go."}], one)
        assert consensus(state, {"t1": again, "t2": again, "t3": other}).outcome == "student_agrees"


def test_the_order_of_actions_does_not_matter_to_a_speller():
    """Files are read for arguments that came as a text as well as for those that came as an object."""
    asks = edit("s = 0", "s = 1").tool_calls[0]
    as_text = Action(tool_calls=(ToolCall("Edit", json.dumps(asks.arguments)),))
    state = TraceState(
        "s",
        [{"role": "user", "content": "Go."}, *reading(SEEN["cart.py"])],
        as_text,
        metadata={"folder": FOLDER},
    )
    assert speller(state)(as_text) == speller(state)(edit("    s = 0\n", "    s = 1\n"))


def test_a_stream_forgets_its_folder_when_the_shell_has_moved(tmp_path):
    def act(n, command):
        call = {"type": "tool_use", "id": f"t{n}", "name": "Bash", "input": {"command": command}}
        told = {"type": "tool_result", "tool_use_id": f"t{n}", "content": "done"}
        return [{"type": "assistant", "session_id": "s", "uuid": f"a{n}", "parent_tool_use_id": None,
                 "message": {"id": f"m{n}", "role": "assistant", "model": "claude-x", "content": [call]}},
                {"type": "user", "session_id": "s", "uuid": f"u{n}", "parent_tool_use_id": None,
                 "message": {"role": "user", "content": [told]}}]  # fmt: skip

    start = {
        "type": "system",
        "subtype": "init",
        "session_id": "s",
        "cwd": FOLDER,
        "tools": ["Bash"],
        "model": "claude-x",
    }
    commands = ["ls", f"cd {FOLDER} && ls", "cat cd.txt", "cd src && ls", "ls"]
    lines = [start, *(line for n, command in enumerate(commands) for line in act(n, command))]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    states = list(ingest(tmp_path / "run.jsonl"))
    assert [s.metadata.get("folder", "") for s in states] == [FOLDER] * 4 + [""]


def test_a_row_for_a_tool_of_ones_own_and_a_role_that_is_none(monkeypatch):
    one, other = (Action(tool_calls=(ToolCall("run", {"cmd": text}),)) for text in ("ls -la", "ls -a -l"))
    assert not same_action(one, other)
    monkeypatch.setitem(agent_tools.ROLES, "run", {"cmd": "shell"})
    assert same_action(one, other)
    monkeypatch.setitem(agent_tools.ROLES, "run", {"cmd": "bash"})
    with pytest.raises(ValueError, match="run: role bash is none of shell"):
        canonical_action(one)


def test_null_is_left_out_only_where_a_schema_or_the_table_says_so():
    tool = {
        "name": "f",
        "parameters": {"properties": {"a": {}, "b": {"default": 3}, "c": {}}, "required": ["c"]},
    }
    f = lambda **arguments: Action(tool_calls=(ToolCall("f", arguments),))  # noqa: E731
    assert same_action(f(a=None, c=1), f(c=1), [tool]) and not same_action(f(a=None, c=1), f(c=1))
    assert not same_action(f(b=None, c=1), f(c=1), [tool]) and not same_action(f(c=None), f(), [tool])
    assert not same_action(f(d=None, c=1), f(c=1), [tool])


def test_teachers_that_differ_in_spelling_agree_in_a_state():
    state = TraceState(
        "s", reading(SEEN["cart.py"], f"{FOLDER}/cart.py"), sh("ls"), metadata={"folder": FOLDER}
    )
    long = "    s = 0\n    for i in items:"
    replies = {"a": edit("s = 0", "s = 1"), "b": edit(long, long.replace("s = 0", "s = 1"), path="cart.py"),
               "c": edit("s = 0", "s = 2")}  # fmt: skip
    found = consensus(state, replies, threshold=2)
    assert found.outcome == "pair" and list(found.votes.values()) == [("a", "b"), ("c",)]
    elsewhere = TraceState("s", state.messages, sh("ls"), metadata={"folder": 7})
    assert speller(elsewhere)(replies["a"]) != speller(state)(replies["a"])  # no folder: another path


def test_logs_tell_the_folder_and_redaction_keeps_paths_comparable(tmp_path):
    folder = "/home/maria/shop"
    line = {"type": "assistant", "uuid": "u2", "parentUuid": "u1", "sessionId": "s", "cwd": folder,
            "version": "2", "message": {
                "id": "m", "role": "assistant", "model": "claude-x", "content": [
                    {"type": "tool_use", "id": "t", "name": "Read",
                     "input": {"file_path": f"{folder}/a.py"}}]}}  # fmt: skip
    first = {
        "type": "user",
        "uuid": "u1",
        "sessionId": "s",
        "cwd": folder,
        "message": {"role": "user", "content": "Look."},
    }
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, (first, line))))
    (state,) = ingest(tmp_path / "log.jsonl")
    assert state.metadata["folder"] == folder
    clean = Redactor().state(state)
    assert "maria" not in json.dumps([dict(clean.metadata), clean.student_action.tool_calls[0].arguments])
    there = Action(tool_calls=(ToolCall("Read", {"file_path": "a.py"}),))
    assert speller(clean)(clean.student_action) == speller(clean)(there)


def test_codex_tells_the_folder_and_follows_it(tmp_path):
    reply = {
        "type": "response_item",
        "payload": {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi."}],
        },
    }
    asked = {
        "type": "response_item",
        "payload": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    }
    moves = {"type": "turn_context", "payload": {"model": "m", "cwd": "/b"}}
    lines = [{"type": "session_meta", "payload": {"id": "s", "cwd": "/a"}}, asked, reply, moves, asked, reply]
    (tmp_path / "rollout.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [s.metadata["folder"] for s in ingest(tmp_path / "rollout.jsonl")] == ["/a", "/b"]
