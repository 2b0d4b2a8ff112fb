"""Tasks of SkyPilot, as its own package reads them and as a shell runs them."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml

from composer_nb.launch.skypilot import (
    SkyOptions,
    launch_words,
    read_by_sky,
    save_tasks,
    sky_command,
    sky_tasks,
)

WORDS = ["s3://runs/one", "a $HOME `id` 'b' \"c\"", "--flag=1 2", "*", ";true", "ü\n"]


def test_skypilot_reads_what_was_meant(tmp_path):
    options = SkyOptions(
        infra="aws/us-east-1", accelerators="H100:8", cpus="16+", memory="64+", spot=True, nodes=2,
        processes=8, image="docker:python:3.11", workdir=str(tmp_path), setup="pip install x\necho 'done'",
        env={"NAME": "a: b #c", "EMPTY": ""}, restarts=5,
    )
    tasks = sky_tasks("pkg.train", 3, WORDS, name="run", options=options)
    files = save_tasks(tasks, tmp_path / "tasks")
    assert [file.name for file in files] == ["run-0.yaml", "run-1.yaml", "run-2.yaml"]
    for rank, (read, task) in enumerate(zip(read_by_sky(files), tasks, strict=True)):
        assert read["name"] == f"run-{rank}" and read["num_nodes"] == 2 and read["run"] == task["run"]
        named = {"REPLICA_RANK": str(rank), "REPLICA_WORLD_SIZE": "3"}
        assert read["envs"] == {"NAME": "a: b #c", "EMPTY": ""} | named
        wish = read["resources"]
        assert wish["infra"] == "aws/us-east-1" and wish["accelerators"] == {"H100": 8} and wish["use_spot"]
        assert (str(wish["cpus"]), str(wish["memory"])) == ("16+", "64+")
        assert wish["job_recovery"]["max_restarts_on_errors"] == 5
        assert read["setup"] == options.setup and os.path.samefile(read["workdir"], tmp_path)


@pytest.mark.parametrize(
    ("wish", "said"), [({"infra": "modal"}, "modal"), ({"infra": "hf"}, "hf"), ({"cpus": "many"}, "cpus")]
)
def test_skypilot_says_what_it_does_not_know(tmp_path, wish, said):
    files = save_tasks(sky_tasks("pkg.train", 1, name="no", options=SkyOptions(**wish)), tmp_path)
    with pytest.raises(ValueError, match=f"(?s)no-0.yaml.*{said}"):
        read_by_sky(files)


def test_a_shell_hands_every_word_on(tmp_path):
    (tmp_path / "my script.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    options = SkyOptions(workdir=str(tmp_path), python=sys.executable)
    (task,) = sky_tasks("my script.py", 1, [*WORDS, 3], name="a", options=options)
    again = yaml.safe_load(save_tasks([task], tmp_path)[0].read_text())
    assert again == task
    told = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    done = subprocess.run(["bash", "-c", again["run"]], **told)
    assert yaml.safe_load(done.stdout) == [*WORDS, "3"]


def test_one_process_needs_no_torchrun_and_several_do():
    assert sky_command("pkg.mod", [], SkyOptions()) == "python3 -m pkg.mod"
    many = shlex.split(sky_command("train.py", ["x"], SkyOptions(nodes=2)))
    assert many[:3] == ["python3", "-m", "torch.distributed.run"]
    assert many[-4:] == ["--nproc_per_node", "1", "train.py", "x"]


def test_secrets_are_named_and_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE_SECRET", "sesame-open-1234")
    options = SkyOptions(secrets=["STORE_SECRET"])
    (file,) = save_tasks(sky_tasks("pkg.mod", 1, name="a", options=options), tmp_path)
    words = launch_words(file, options)
    assert words[-3:] == ["--secret", "STORE_SECRET", str(file)]
    assert "STORE" not in (text := file.read_text()) and "sesame" not in text + " ".join(words)
    monkeypatch.delenv("STORE_SECRET")
    with pytest.raises(ValueError, match="STORE_SECRET, which is not set"):
        launch_words(file, options)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"nodes": 0}, "nodes=0"), ({"processes": 0}, "processes=0"), ({"restarts": -1}, "restarts=-1"),
        ({"python": "python3; id"}, "python="), ({"secrets": "KEY"}, "list of names"),
        ({"secrets": ["A-B"]}, "A-B"),
        ({"secrets": ["REPLICA_RANK"]}, "REPLICA_RANK"), ({"env": {"REPLICA_RANK": "3"}}, "REPLICA_RANK"),
        ({"env": {"KEY": "1"}, "secrets": ["KEY"]}, "both name KEY"),
    ],
)
def test_options_without_sense_are_refused(wish, said):
    with pytest.raises(ValueError, match=said):
        SkyOptions(**wish)


def test_a_value_that_is_passed_for_a_name_is_not_repeated(tmp_path):
    for wish in ({"secrets": ["KEY=sesame-open"]}, {"secrets": "sesame-open"}):
        with pytest.raises(ValueError, match="secrets") as caught:
            SkyOptions(**wish)
        assert "sesame" not in str(caught.value)
    options = SkyOptions(env={"KEY": "sesame-open"})
    assert "sesame" not in repr(options)
    (file,) = save_tasks(sky_tasks("pkg.mod", 1, name="a", options=options), tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and "sesame-open" in file.read_text()


def test_a_folder_is_one_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    (task,) = sky_tasks("train.py", 1, name="a", options=SkyOptions(workdir="~/code"))
    assert task["workdir"] == str(tmp_path / "code")
    (tmp_path / "a$b").mkdir()
    for wrong in ("~/none", "~/a$b"):
        with pytest.raises(ValueError, match="workdir="):
            sky_tasks("pkg.mod", 1, name="a", options=SkyOptions(workdir=wrong))


@pytest.mark.parametrize(
    ("entrypoint", "n", "name", "said"),
    [
        ("pkg.mod:function", 1, "a", "no entrypoint"), ("rm -rf /", 1, "a", "no entrypoint"),
        ("absent.py", 1, "a", "absent.py"), ("pkg.mod", 0, "a", "n_replicas=0"),
        ("pkg.mod", 1, "A_b", "A_b"), ("pkg.mod", 1, "", "name=''"), ("pkg.mod", 1, "a" * 41, "name="),
    ],
)
def test_tasks_without_sense_are_refused(entrypoint, n, name, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        sky_tasks(entrypoint, n, name=name, options=SkyOptions(workdir=str(tmp_path)))
