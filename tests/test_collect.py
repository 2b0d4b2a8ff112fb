"""Episodes answered by teachers: resumed, not asked twice, read back as states, and honest about
what ended early.
"""

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.replay.http_teacher import HTTPTeacher
from composer_nb.replay.ledger import Ledger
from composer_nb.replay.protocol import TeacherReply, TeacherStop, teacher_messages
from composer_nb.replay.protocol import TeacherRequest as Request
from composer_nb.tasks.arithmetic import Arithmetic
from composer_nb.tasks.collect import collect, name_of, read_played, score_of
from composer_nb.tasks.contract import EpisodeLost, family_of
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import HouseRules, rules_of
from composer_nb.tasks.tool_calls_multi_turn import MultiTurn
from composer_nb.traces import Action, ChatIngester

FILES = Files(dials=(Difficulty(2), Difficulty(3)))


class Scripted:
    """A teacher that knows the solutions; it counts what it is asked, and may refuse or stop."""

    name = model = "vendor/scripted"

    def __init__(self, family, tasks, refuse=lambda text: "", stop_after=None):
        self.asked, self.refuse, self.stop_after, self.closed = [], refuse, stop_after, 0
        self.solutions = {}
        for task in tasks:
            episode, answers = family.episode(task), iter(family.reference(task))
            while not episode.done:
                context = json.dumps(episode.messages())
                self.solutions[context] = answer = next(answers)
                episode.step(answer)

    def request(self, state):
        return Request(self.name, self.model, teacher_messages(state.messages))

    def worst_case_usd(self, request):
        return 0.0

    async def reply(self, request):
        self.asked.append(request)
        if self.stop_after is not None and len(self.asked) > self.stop_after:
            raise TeacherStop(self.name, 401, "no key")
        context = json.dumps(list(request.messages))
        if why := self.refuse(context):
            return TeacherReply(request.key, self.name, None, "skipped", why)
        return TeacherReply(request.key, self.name, Action(self.solutions.get(context, "hello")))

    async def aclose(self):
        self.closed += 1


@pytest.mark.parametrize(
    "family",
    [FILES, Arithmetic(), MultiTurn("base"), MultiTurn("miss_func")],
    ids=lambda f: f"{f.name}-{getattr(f, 'category', '')}",
)
def test_solutions_solve_and_come_back_as_states(tmp_path, family):
    tasks = family.tasks("heldout", 6)
    teacher = Scripted(family, tasks)
    played = collect(teacher, family, tasks, tmp_path / "a" / "played.jsonl", progress=False)
    assert (
        all(one.solved and one.reward == pytest.approx(1) and not one.skipped for one in played)
        and teacher.closed == 1
    )
    assert [one.key for one in played] == [name_of(family, task, teacher.model) for task in tasks]
    states = list(ChatIngester().ingest(tmp_path / "a" / "played.jsonl"))
    context = lambda state: json.dumps(list(teacher_messages(state.messages)))
    asked = {json.dumps(list(request.messages)) for request in teacher.asked}
    assert len(states) == len(teacher.asked) and {context(s) for s in states} == asked
    assert all(s.student_action.text == teacher.solutions[context(s)] for s in states)
    assert {s.model for s in states} == {"vendor/scripted"}


def test_a_second_run_asks_for_what_is_missing_alone(tmp_path):
    tasks, path = FILES.tasks("heldout", 6), tmp_path / "played.jsonl"
    first = collect(Scripted(FILES, tasks), FILES, tasks[:4], path, progress=False)
    with path.open("a") as file:
        file.write('{"key": "cut sho')  # a kill in the middle of a line
    teacher = Scripted(FILES, tasks)
    second = collect(teacher, FILES, tasks, path, progress=False)
    assert second[:4] == first and len(read_played(path)) == 6
    assert len(teacher.asked) == sum(len(FILES.reference(task)) for task in tasks[4:])
    other = Scripted(FILES, tasks)
    other.model = "vendor/another"
    assert collect(other, FILES, tasks[:1], path, progress=False)[0].model == "vendor/another" and other.asked


def test_a_teacher_that_stops_leaves_what_was_finished(tmp_path):
    tasks, path = FILES.tasks("heldout", 6), tmp_path / "played.jsonl"
    teacher = Scripted(FILES, tasks, stop_after=7)
    with pytest.raises(TeacherStop, match="no key"):
        collect(teacher, FILES, tasks, path, at_once=1, progress=False)
    done = read_played(path)
    assert 0 < len(done) < 6 and all(one.solved for one in done.values()) and teacher.closed == 1
    assert all(one.solved for one in collect(Scripted(FILES, tasks), FILES, tasks, path, progress=False))


def test_what_ended_early_says_why_and_counts_as_not_done(tmp_path):
    tasks = FILES.tasks("heldout", 4)
    refused = collect(
        Scripted(FILES, tasks, refuse=lambda context: "too long"),
        FILES,
        tasks,
        tmp_path / "a",
        progress=False,
    )
    assert all(one.skipped == "too long" and not one.solved and not one.faults for one in refused)
    limited = collect(Scripted(FILES, tasks), FILES, tasks, tmp_path / "b", limit=1, progress=False)
    assert all(one.skipped == "not done after 1 answers" and len(one.faults) == 1 for one in limited)


def test_a_lost_episode_is_said_and_played_again(tmp_path, monkeypatch, caplog):
    tasks = FILES.tasks("heldout", 1)
    teacher = Scripted(FILES, tasks)

    def gone(self, text):
        raise EpisodeLost("the server died")

    with monkeypatch.context() as broken:
        broken.setattr(type(FILES.episode(tasks[0])), "step", gone)
        with pytest.raises(TeacherStop, match="1 of 1 .* not done: 1 whose world was lost, run again [(]"):
            collect(teacher, FILES, tasks, tmp_path / "a", progress=False)
    assert "the server died" in caplog.text
    with monkeypatch.context() as broken:  # as a server that does not answer when an episode begins
        broken.setattr(type(FILES), "episode", lambda self, task: gone(self, task))
        broken.setattr("composer_nb.tasks.collect.name_of", lambda family, task, model: "one")
        with pytest.raises(TeacherStop, match="1 of 1 .* not done: 1 whose world was lost, run again [(]"):
            collect(teacher, FILES, tasks, tmp_path / "b", progress=False)
    assert collect(teacher, FILES, tasks, tmp_path / "a", progress=False)[0].solved


def test_bad_input_is_named(tmp_path):
    tasks, path = FILES.tasks("heldout", 2), tmp_path / "played.jsonl"
    for options in (dict(at_once=0), dict(limit=0)):
        with pytest.raises(ValueError, match="at least one"):
            collect(Scripted(FILES, tasks), FILES, tasks, path, **options)
    with pytest.raises(ValueError, match="twice"):
        collect(Scripted(FILES, tasks), FILES, [tasks[0]] * 2, path)
    path.write_text('{"key": 1}\n')
    with pytest.raises(ValueError, match="played.jsonl:1 is no episode"):
        collect(Scripted(FILES, tasks), FILES, tasks, path)


class Knowing(BaseHTTPRequestHandler):
    """An endpoint in OpenAI's chat format that knows the answers: as text, or as native calls."""

    solutions: dict[str, str] = {}
    native = False
    asked = made = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked += 1
        text = self.solutions[json.dumps(body["messages"])]
        message = {"role": "assistant", "content": text}
        if self.native and text.startswith(("[", "{")):
            made = json.loads(text)
            type(self).made += 1
            calls = [
                {"id": f"c{i}", "type": "function",
                 "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])}}
                for i, one in enumerate(made if isinstance(made, list) else [made])
            ]  # fmt: skip
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        told = {"model": body["model"], "choices": choices, "usage": usage}
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        return


AS_TEXT = ["files", "house_rules", "arithmetic", "multi_turn_base"]
AS_CALLS = ["files_json", "house_rules", "multi_turn_base", "multi_turn_miss_func"]


@pytest.mark.parametrize(
    ("name", "native"), [*((name, False) for name in AS_TEXT), *((name, True) for name in AS_CALLS)]
)
def test_a_model_behind_http_that_knows_all_solves_all(tmp_path, name, native):
    family, known = family_of(name), {}
    for task in family.tasks("heldout", 5):
        episode, answers = family.episode(task), iter(family.reference(task))
        while not episode.done:
            context, text = json.dumps(list(teacher_messages(episode.messages()))), next(answers)
            if native and text.startswith("[") and len(made := json.loads(text)) == 1:
                text = json.dumps(made[0])  # as a single native call is written
            known[context] = text
            episode.step(text)
    handler = type("Handler", (Knowing,), {"solutions": known, "native": native})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        where = ["--base-url", f"http://127.0.0.1:{server.server_port}/v1", "--out", str(tmp_path / "p")]
        words = ["score", name, "--model", "vendor/knowing", "--count", "5", *where]
        first, asked = CliRunner().invoke(app, words), handler.asked
        again = CliRunner().invoke(app, words)
        server.shutdown()
    assert first.exit_code == 0, first.output
    assert "solved: 1.000 (0.566 to 1.000) of 5 episodes\nreward: 1.000\n" in first.output
    assert again.exit_code == 0 and handler.asked == asked > 0
    assert "solved: 1.000" in again.output and (handler.made > 0) == native


def test_other_rules_are_another_episode_and_another_setting_another_file(tmp_path, monkeypatch):
    one, other = (HouseRules(rules_of(2, seed)) for seed in (0, 5))
    task = one.tasks("heldout", 1)[0]
    assert (
        name_of(one, task, "m") == name_of(HouseRules(rules_of(2, 0)), task, "m") != name_of(other, task, "m")
    )
    monkeypatch.chdir(tmp_path)
    made = []
    kept = lambda teacher, family, tasks, place, **_: made.append(place) or []  # noqa: E731
    monkeypatch.setattr("composer_nb.tasks.collect.collect", kept)
    for words in ([], [], ["--max-tokens", "9"]):
        where = ["--model", "v/m", "--base-url", "http://127.0.0.1:9/v1", *words]
        CliRunner().invoke(app, ["score", "files", "--count", "1", *where])
    assert made[0] == made[1] != made[2] and made[0].name.startswith("files-v_m-")


def test_a_score_has_an_interval_and_says_what_went_wrong(tmp_path):
    tasks = FILES.tasks("heldout", 4)
    right = collect(Scripted(FILES, tasks), FILES, tasks, tmp_path / "a", progress=False)
    wrong = collect(
        Scripted(FILES, tasks, refuse=lambda context: "too long"),
        FILES,
        tasks,
        tmp_path / "b",
        progress=False,
    )
    found = score_of([*right, *wrong])
    assert (found.solved, found.episodes, found.skipped) == (0.5, 8, {"too long": 4})
    assert (found.low, found.high) == (pytest.approx(0.2152, abs=1e-4), pytest.approx(0.7848, abs=1e-4))
    assert "    4 too long" in str(found)
    with pytest.raises(ValueError, match="no episode was played"):
        score_of([])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense", "--base-url", "http://127.0.0.1:9/v1"], "'nonsense' is not one of files"),
        (["files", "--base-url", "http://127.0.0.1:9/v1", "--count", "0"], "no episode was played"),
        (
            ["files", "--base-url", "https://openrouter.ai/api/v1"],
            "may cost money: say how much may be spent",
        ),
    ],
)
def test_a_score_that_cannot_be_had_says_why(tmp_path, words, says):
    told = ["score", *words, "--model", "vendor/x", "--out", str(tmp_path / "p.jsonl")]
    asked = CliRunner().invoke(app, told)
    assert asked.exit_code == 1 and says in asked.output and "Traceback" not in asked.output


class Priced(Scripted):
    """Each answer costs an eighth of a dollar."""

    def worst_case_usd(self, request):
        return 0.125

    async def reply(self, request):
        return replace(await super().reply(request), cost_usd=0.125)


def test_a_teacher_that_costs_money_is_not_asked_without_a_ceiling(tmp_path):
    tasks = FILES.tasks("heldout", 2)
    teacher = Priced(FILES, tasks)
    with pytest.raises(
        ValueError, match="'vendor/scripted' costs money: say how much may be spent, ceiling_usd="
    ):
        collect(teacher, FILES, tasks, tmp_path / "p.jsonl", progress=False)
    assert not teacher.asked and teacher.closed == 1


def test_a_ceiling_is_kept_and_what_was_answered_is_not_paid_again(tmp_path):
    """Some episodes are done, some are cut off in the middle; with more money those go on where they were."""
    tasks, place = FILES.tasks("heldout", 6), tmp_path / "p.jsonl"
    turns = sum(len(FILES.reference(task)) for task in tasks)
    teacher = Priced(FILES, tasks)
    with pytest.raises(TeacherStop, match=r"\d of 6 .*: \d that the budget did not reach, raise .*=0.8 "):
        collect(teacher, FILES, tasks, place, ceiling_usd=0.8, at_once=3, progress=False)
    assert len(teacher.asked) == 6 and 0 < len(read_played(place)) < 6
    assert all(one.solved for one in read_played(place).values())
    later = Priced(FILES, tasks)
    played = collect(later, FILES, tasks, place, ceiling_usd=100.0, at_once=3, progress=False)
    assert all(one.solved for one in played) and len(teacher.asked) + len(later.asked) == turns
    with Ledger(tmp_path / "p.jsonl.ledger") as ledger:
        assert ledger.spent_usd == turns * 0.125 and not ledger.open_requests
    third = Priced(FILES, tasks)
    assert collect(third, FILES, tasks, place, ceiling_usd=0.0, progress=False) == played and not third.asked


@pytest.mark.parametrize("kind", ["extra_key", "arguments_first"])
def test_an_answer_over_http_is_graded_as_it_was_written(kind, tmp_path):
    """Rules about the object itself are kept in text, which must not be written anew on the way."""
    family = HouseRules(rules_of(1, kinds=(kind,)))
    tasks = family.tasks("heldout", 2)
    asked = (json.dumps(list(teacher_messages(family.episode(task).messages()))) for task in tasks)
    known = dict(zip(asked, (family.reference(task)[0] for task in tasks), strict=True))
    handler = type("Handler", (Knowing,), {"solutions": known})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        teacher = HTTPTeacher("vendor/knowing", f"http://127.0.0.1:{server.server_port}/v1")
        played = collect(teacher, family, tasks, tmp_path / "a", progress=False)
        server.shutdown()
    assert all(one.solved for one in played), [one.messages[-1] for one in played]
