"""A data set goes to a hub: only complete, clean, and with a token of the environment; never half."""

import json

import pytest
from datasets import load_dataset
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.drills.hub_server import HubServer
from composer_nb.replay.dataset import UNFINISHED, preference_dataset, write_dataset
from composer_nb.replay.publish import push_dataset
from composer_nb.traces import DPOPair


def folder(path, text="a.py", complete=True):
    pair = DPOPair(
        state_messages=[{"role": "user", "content": "Which file?"}],
        chosen=text,
        rejected="b.py",
        n_teachers_agreeing=2,
        state_id="s/0",
    )
    write_dataset(preference_dataset([pair]), path)
    card = path / "README.md"
    assert UNFINISHED in " ".join(card.read_text().split())
    if complete:
        card.write_text(card.read_text().split("Made with")[0] + "Our own sessions, CC0.")
    return path


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", running.token)
        yield running


def push(*words):
    done = CliRunner().invoke(app, ["replay", "push", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_what_is_pushed_can_be_loaded(hub, tmp_path):
    code, out, why = push(folder(tmp_path / "d"), "me/pairs")
    assert code == 0 and f"{hub.url}/datasets/me/pairs/commit/" in out, why
    assert hub.private and set(hub.files["me/pairs"]) == {"pairs.parquet", "README.md"}
    (tmp_path / "back.parquet").write_bytes(hub.files["me/pairs"]["pairs.parquet"])
    (row,) = load_dataset("parquet", data_files=str(tmp_path / "back.parquet"), split="train")
    assert row["state_id"] == "s/0" and "CC0" in hub.files["me/pairs"]["README.md"].decode()
    assert push(tmp_path / "d", "me/pairs", "--public")[0] == 0 and not hub.private


def test_other_files_of_the_folder_stay(hub, tmp_path):
    place = folder(tmp_path)
    write_dataset(
        preference_dataset(
            [
                DPOPair(
                    state_messages=[{"role": "user", "content": "x"}],
                    chosen="a",
                    rejected="b",
                    n_teachers_agreeing=2,
                    state_id="s",
                )
            ]
        ),
        place,
    )
    (place / "README.md").write_text("complete")
    (place / "notes.txt").write_text("mine")
    assert (place / "README.md.before").exists() and push(place, "me/pairs")[0] == 0
    assert set(hub.files["me/pairs"]) == {"pairs.parquet", "README.md"}


@pytest.mark.parametrize(
    "text, said", [("mail jane.roe@corp.de", "e-mail"), ("key AKIAIOSFODNN7EXAMPLQ", "row 1")]
)
def test_a_row_that_redaction_would_change_does_not_leave(hub, tmp_path, text, said):
    code, _, why = push(folder(tmp_path, text), "me/pairs")
    assert (
        code == 1
        and "what redaction replaces" in why
        and said in why.lower()
        and not hub.asked
        and why.count("\n") == 1
    )


def test_personal_data_may_be_let_through_and_secrets_may_not(hub, tmp_path):
    assert push(folder(tmp_path, "call +49 30 901820"), "me/pairs")[0] == 1 and not hub.asked
    assert push(tmp_path, "me/pairs", "--no-personal")[0] == 0
    assert push(folder(tmp_path / "b", "AKIAIOSFODNN7EXAMPLQ"), "me/b", "--no-personal")[0] == 1


def test_refusals_are_one_line_and_send_nothing(hub, tmp_path, monkeypatch):
    assert "holds no data set" in push(tmp_path, "me/pairs")[2]
    assert "complete it" in push(folder(tmp_path / "raw", complete=False), "me/pairs")[2]
    place = folder(tmp_path / "d")
    assert "is no name of a data set" in push(place, "a name/with/slashes")[2]
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN is empty" in push(place, "me/pairs")[2]
    assert not hub.asked and not hub.files
    monkeypatch.setenv("HF_TOKEN", "hf_somebody_elses_0123456789")
    code, _, why = push(place, "me/pairs")
    assert (
        code == 1
        and "refused 'me/pairs': HTTP 401" in why
        and why.count("\n") == 1
        and "hf_somebody" not in why
    )
    assert not hub.files


def test_no_token_is_read_from_a_file(hub, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(hub.token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", " ")
    with pytest.raises(ValueError, match="HF_TOKEN is empty"):
        push_dataset(folder(tmp_path / "d"), "me/pairs")


def test_without_a_hub_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    code, _, why = push(folder(tmp_path), "me/pairs")
    assert code == 1 and "http://127.0.0.1:9 is not reachable" in why and why.count("\n") == 1


def test_the_hub_may_be_strict(tmp_path, hub):
    """What the drill hub was asked is what the documents name, in this order."""
    push(folder(tmp_path), "me/pairs")
    assert hub.asked[0] == "/api/repos/create" and hub.asked[-1].endswith("/commit/main")
    assert json.dumps(hub.asked).count("preupload") == 1
