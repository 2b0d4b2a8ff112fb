"""What only Kubernetes does: the real client before an imitation of a cluster (`drills.kubernetes_cluster`).

What every executor promises is in `test_launchers`, for Kubernetes too.
"""

import json
import os
import signal
import time
import urllib.request
import warnings
from pathlib import Path

import pytest
from test_launchers import KUBERNETES, PROGRAM, mark_of, until

from composer_nb.drills.kubernetes_api import matches
from composer_nb.drills.kubernetes_cluster import INDEX, REMEDY, KubernetesCluster, processes, ranges
from composer_nb.launch.entrypoint import marked
from composer_nb.launch.job import Program
from composer_nb.launch.kubernetes import (
    KubernetesError,
    KubernetesExecutor,
    indexes,
    job_name,
    launch_of,
    pod_state,
)
from composer_nb.launch.kubernetes_job import KubernetesOptions, job_manifest
from composer_nb.launch.local import Task
from composer_nb.launch.queue_executor import SharedPlace, Submission
from composer_nb.launch.queue_jobs import QueueError, read_exit


@pytest.fixture(scope="module")
def module_cluster():
    if reason := KubernetesCluster.reason():
        pytest.skip(f"not run: {reason}")
    with KubernetesCluster() as made:
        yield made


@pytest.fixture
def cluster(module_cluster):
    "With nothing in it, as it was made."
    yield module_cluster
    module_cluster.api.away = module_cluster.api.old = False
    module_cluster.pods_allowed = None
    until(lambda: not any(p["status"]["phase"] == "Running" for p in pods_in(module_cluster)))
    with module_cluster.store.lock:
        for kind in module_cluster.store.objects.values():
            kind.clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    return tmp_path


def on_kubernetes(folder, heartbeat_s=None, **wishes):
    options = KubernetesOptions(**KUBERNETES | wishes)
    return KubernetesExecutor(folder, grace_s=1, options=options, heartbeat_s=heartbeat_s)


def pods_in(cluster):
    with cluster.store.lock:
        return list(cluster.store.objects["pods"].values())


def jobs_in(cluster):
    with cluster.store.lock:
        return list(cluster.store.objects["jobs"])


def call(cluster, method, path, how=""):
    "A request of a person's."
    server = json.loads(cluster.config.read_text())["clusters"][0]["cluster"]["server"]
    url = f"{server}/{path}" + (f"?propagationPolicy={how}" if how else "")
    head = {"Authorization": f"Bearer {cluster.api.token}"}
    urllib.request.urlopen(urllib.request.Request(url, method=method, headers=head)).read()


def delete_by_hand(cluster, pod):
    call(cluster, "DELETE", f"api/v1/namespaces/learning/pods/{pod['metadata']['name']}")


def test_a_lost_node_is_told_or_healed(folder):
    "With requeue the replica goes on elsewhere, under the same handle; without, it has failed with its node."
    if reason := KubernetesCluster.reason():
        pytest.skip(f"not run: {reason}")
    with KubernetesCluster(cpus=2) as cluster:
        told, healed = on_kubernetes(folder), on_kubernetes(folder, requeue=True)
        (here,), handles = (
            told.launch_replicas(1, "prog:snooze"),
            healed.launch_replicas(2, "prog:walk", [200]),
        )
        until(lambda: told.tail(here) == "awake" and all("step 4" in healed.tail(h) for h in handles))
        until(lambda: all(row["node"] for row in healed.table()))
        last = healed.table()[1]
        assert last["node"] == "node-1"
        (there,) = told.launch_replicas(1, "prog:snooze")
        until(lambda: told.tail(there) == "awake")
        cluster.lose("node-1")
        (lost,) = told.collect([there], timeout=30)
        assert (lost.status, lost.exit_code) == ("failed", None) and "NODE_FAIL" in lost.error
        until(lambda: healed.table()[1]["put_back"] == 1)
        assert healed.table()[1]["queue"].startswith("PENDING (")
        told.close()  # makes room
        first, second = healed.collect(handles, timeout=60)
    assert (first.status, first.value["first"]) == ("succeeded", 0)
    assert second.status == "succeeded" and second.value["first"] >= 4
    assert [row["node"] for row in healed.table()] == ["node-0"] * 2


def test_no_two_lives_of_a_rank_at_once(folder):
    "Whose program ignores SIGTERM, through a lost node, a restart and a deletion by hand."
    if reason := KubernetesCluster.reason():
        pytest.skip(f"not run: {reason}")
    with KubernetesCluster(cpus=1) as cluster:
        made = on_kubernetes(folder, requeue=True)
        (handle,) = made.launch_replicas(1, "prog:alone")
        lives = lambda: (folder / "lives").read_text().split() if (folder / "lives").exists() else []  # noqa: E731
        until(lambda: len(lives()) == 1 and made.table()[0]["node"])
        cluster.lose(made.table()[0]["node"])
        until(lambda: len(lives()) == 2)
        again = made.restart(handle)
        until(lambda: len(lives()) == 3)
        (pod,) = [p for p in pods_in(cluster) if p["status"]["phase"] == "Running"]
        delete_by_hand(cluster, pod)
        (result,) = made.collect([again], timeout=40)
    assert (result.status, result.exit_code) == ("failed", None) and "its pod is gone" in result.error
    assert not (folder / "twice").exists() and marked(mark_of(again)) == []


def test_one_of_three_is_cancelled_and_its_job_stays(cluster, folder):
    made = on_kubernetes(folder)
    handles = made.launch_replicas(3, "prog:walk", [10**4])
    until(lambda: all("step 4" in made.tail(h) for h in handles))
    made.cancel([handles[1]])
    assert marked(mark_of(handles[1])) == []
    time.sleep(0.5)  # a Job that replaced the pod would have done so
    assert len(jobs_in(cluster)) == 1 and [made.poll(h) for h in handles] == [
        "running",
        "cancelled",
        "running",
    ]
    assert sum(p["status"]["phase"] == "Running" for p in pods_in(cluster)) == 2
    (folder / "go").touch()
    results = made.collect(handles, timeout=30)
    assert [r.status for r in results] == ["succeeded", "cancelled", "succeeded"]


def test_one_that_has_no_room_waits_and_can_be_cancelled(cluster, folder):
    made = on_kubernetes(folder, heartbeat_s=1, cpus=8)
    handles = made.launch_replicas(3, "prog:walk", [10**4])
    until(lambda: [row["queue"][:7] for row in made.table()].count("RUNNING") == 2)
    until(lambda: any("Insufficient cpu" in row["queue"] for row in made.table()))
    (waits,) = [h for h, row in zip(handles, made.table()) if row["queue"] != "RUNNING"]
    time.sleep(2)
    assert made.poll(waits) == "running"  # not hung: it has not begun
    made.cancel([waits])
    assert made.collect([waits], timeout=5)[0].status == "cancelled"
    assert not (folder / "replicas" / waits.launch / f"rank{waits.rank}-run0" / "began").exists()
    made.cancel(handles)
    until(lambda: jobs_in(cluster) == [])


def test_a_quota_that_is_used_up_is_told_and_waited_out(cluster, folder):
    cluster.pods_allowed = 1
    made = on_kubernetes(folder)
    handles = made.launch_replicas(2, "prog:add", [1])
    until(lambda: any("exceeded quota" in row["queue"] for row in made.table()))
    cluster.pods_allowed = None
    assert [r.value for r in made.collect(handles, timeout=30)] == [[2, 0, 2, "0"], [2, 1, 2, "0"]]


def test_a_pod_deleted_by_hand_is_told(cluster, folder):
    made = on_kubernetes(folder)
    handles = made.launch_replicas(2, "prog:snooze")
    until(lambda: all(made.tail(h) == "awake" for h in handles))
    delete_by_hand(cluster, pods_in(cluster)[0])
    (gone,) = made.collect([handles[0]], timeout=30)
    assert (gone.status, gone.exit_code) == ("failed", -signal.SIGTERM)
    assert made.poll(handles[1]) == "running"
    made.cancel(handles)


def test_a_time_limit_is_kept_without_a_launcher(cluster, folder):
    made = on_kubernetes(folder, time_limit_s=2, begin_s=0.0)
    (handle,) = made.launch_replicas(1, "prog:stubborn")
    until(lambda: any(p["status"]["phase"] == "Failed" for p in pods_in(cluster)))
    other = on_kubernetes(folder)
    (result,) = other.collect([other.attach(handle)], timeout=10)
    assert result.status == "timed_out" and "time limit of its job" in result.error
    assert marked(mark_of(handle)) == []


def test_one_that_does_not_hear_ends_with_its_pod(cluster, folder):
    made = on_kubernetes(folder)
    (handle,) = made.launch_replicas(1, "prog:snooze")
    until(lambda: made.tail(handle) == "awake" and made.table()[0]["queue"] == "RUNNING")
    files = folder / "replicas" / handle.launch / "rank0-run0"
    (uid,) = [p["metadata"]["uid"] for p in pods_in(cluster) if p["status"]["phase"] == "Running"]
    for pid in processes(uid):  # the whole container stands still
        os.kill(pid, signal.SIGSTOP)
    with pytest.warns(UserWarning, match="did not hear it: see `kubectl get pods`"):
        made.cancel([handle])
    assert made.collect([handle], timeout=5)[0].status == "cancelled" and processes(uid) == []
    assert (files / "bell.TERM").exists() and read_exit(files / "exit") is None


def test_the_api_may_be_away(cluster, folder):
    made = on_kubernetes(folder)
    handles = made.launch_replicas(2, "prog:walk", [10**4])
    until(lambda: all("step 4" in made.tail(h) for h in handles))
    cluster.api.away = True
    with pytest.warns(UserWarning, match="judged by the work folder alone: .*etcdserver: request timed out"):
        time.sleep(0.5)
        assert made.poll(handles[0]) == "running"
    (folder / "go").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [r.status for r in made.collect(handles, timeout=30)] == ["succeeded"] * 2
    with pytest.raises(
        KubernetesError, match="gave no answer when it was asked to take a Job in: etcdserver"
    ):
        made.launch_replicas(1, "prog:add", [1])
    assert sorted(path.name for path in (folder / "replicas").iterdir()) == [handles[0].launch]


def test_a_cluster_that_would_start_replicas_again_is_refused(cluster, folder):
    cluster.api.old = True
    with pytest.raises(KubernetesError, match="a cluster before 1.29 would start replicas again by itself"):
        on_kubernetes(folder).launch_replicas(2, "prog:add", [1])
    until(lambda: jobs_in(cluster) == [])
    assert not (folder / "replicas").exists()


def test_a_launcher_that_would_ask_elsewhere_is_refused(cluster, folder, tmp_path, monkeypatch):
    made = on_kubernetes(folder)
    (handle,) = made.launch_replicas(1, "prog:snooze")
    other = on_kubernetes(folder, namespace="theirs")
    with pytest.raises(ValueError, match="runs where {'namespace': 'learning'}"):
        other.attach(handle)
    made.cancel([handle])
    config = json.loads(cluster.config.read_text())
    config["users"][0]["user"]["token"] = "of-yesterday"
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(KubernetesError, match="Unauthorized .HTTP 401.: see `kubectl auth can-i"):
        on_kubernetes(folder).launch_replicas(1, "prog:add", [1])
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "config").write_text(json.dumps(config))
    with pytest.raises(KubernetesError, match="127.0.0.1:9 gave no answer .*see `kubectl cluster-info`"):
        on_kubernetes(folder).launch_replicas(1, "prog:add", [1])


def test_without_a_configuration_or_the_package_it_says_what_to_do(folder, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(folder / "nowhere"))
    with pytest.raises(KubernetesError, match="no cluster is known here .*set KUBECONFIG"):
        on_kubernetes(folder).launch_replicas(1, "prog:add", [1])
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(KubernetesError, match="pip install 'composer-notebooks.kubernetes.'"):
        on_kubernetes(folder).launch_replicas(1, "prog:add", [1])
    assert not (folder / "replicas").exists()


def test_a_program_is_told_through_the_ear_and_has_its_grace(cluster, folder):
    """A kubelet reads $$ in a command; what is lost there would be found out only when nobody hears."""
    made = on_kubernetes(folder)
    tidy, stubborn = (made.launch_replicas(1, f"prog:{name}")[0] for name in ("tidy", "stubborn"))
    until(lambda: made.tail(tidy) == made.tail(stubborn) == "awake")
    made.cancel([tidy])
    assert made.collect([tidy])[0].exit_code == 5 and "tidied" in made.tail(tidy)
    made.cancel([stubborn])
    assert made.collect([stubborn])[0].exit_code == -signal.SIGKILL


def test_a_pod_that_comes_after_its_cancellation_begins_nothing(cluster, folder):
    "The controller was slow, or a quota was used up."
    cluster.pods_allowed = 0
    made = on_kubernetes(folder)
    (handle, other) = made.launch_replicas(2, "prog:snooze")
    until(lambda: "exceeded quota" in made.table()[0]["queue"])
    with pytest.warns(UserWarning, match="not seen to end"):
        made._launcher._submitter.queue.limit_s = 1.0
        made.cancel([handle])
    cluster.pods_allowed = None
    until(lambda: made.tail(other) == "awake")
    (late,) = [p for p in pods_in(cluster) if p["metadata"]["annotations"][INDEX] == "0"]
    until(lambda: late["status"]["phase"] == "Failed")
    assert not (folder / "replicas" / handle.launch / "rank0-run0" / "began").exists()
    assert made.poll(handle) == "cancelled"
    made.cancel([other])


def test_a_restart_beside_a_life_that_is_not_seen_to_end_is_refused(cluster, folder):
    made = on_kubernetes(folder)
    (handle,) = made.launch_replicas(1, "prog:snooze")
    until(lambda: made.tail(handle) == "awake")
    queue = made._launcher._submitter.queue
    queue.limit_s, queue._delete_job = 0.5, lambda name: None
    queue._delete_pods = lambda tasks, **wish: None
    for pid in processes(pods_in(cluster)[0]["metadata"]["uid"]):
        os.kill(pid, signal.SIGSTOP)
    said = "was not seen to end .*would be beside it"
    with pytest.warns(UserWarning), pytest.raises(QueueError, match=said):
        made.restart(handle)
    assert len(jobs_in(cluster)) == 1
    del queue._delete_job, queue._delete_pods
    made._supervisor.cancel(list(made._register.lives.values()))
    queue.cancel([f"{handle.pid}_0"])
    until(lambda: jobs_in(cluster) == [])


def test_a_job_deleted_by_hand_is_over_when_its_pods_are(cluster, folder):
    "They have their grace, and are at work in it."
    made = on_kubernetes(folder)
    (handle,) = made.launch_replicas(1, "prog:stubborn")
    until(lambda: made.tail(handle) == "awake" and made.table()[0]["queue"] == "RUNNING")
    call(cluster, "DELETE", f"apis/batch/v1/namespaces/learning/jobs/{jobs_in(cluster)[0]}", "Background")
    assert jobs_in(cluster) == []
    time.sleep(2.5)  # longer than lag_s
    assert made.poll(handle) == "running" and marked(mark_of(handle))
    (result,) = made.collect([handle], timeout=30)
    assert result.status == "failed" and marked(mark_of(handle)) == []


def test_the_image_keeps_what_is_its_own(cluster, folder, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/of/the/launcher")
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/launcher")
    names = ["HOME", "SSL_CERT_FILE", "VIRTUAL_ENV", "OF_THE_IMAGE", "OMP_NUM_THREADS"]
    with KubernetesExecutor(folder, grace_s=1, threads=2, options=KubernetesOptions(**KUBERNETES)) as made:
        (result,) = made.collect(made.launch_replicas(1, "prog:show", names), timeout=30)
    assert list(result.value.values()) == ["/", None, None, "yes", "2"]


def test_the_lines_against_second_lives_are_in_every_job(cluster, folder):
    "And jobs are deleted with their pods: the API's default would leave them."
    names = ("completionMode", "backoffLimitPerIndex", "podReplacementPolicy")
    made, before = on_kubernetes(folder, requeue=True), len(cluster.api.requests)
    (handle,) = made.launch_replicas(1, "prog:snooze")
    until(lambda: made.tail(handle) == "awake")
    made.cancel([made.restart(handle)])
    asked = cluster.api.requests[before:]
    posts = [json.loads(r.split(" ", 2)[2]) for r in asked if r.startswith("POST")]
    assert len(posts) == 2
    for job in posts:
        told = [job["spec"][name] for name in names]
        assert told == ["Indexed", 0, "Failed"]
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    gone = [r for r in asked if r.startswith("DELETE /apis/batch")]
    assert len(gone) >= 2 and all("propagationPolicy=Foreground" in r for r in gone)


def test_a_context_that_is_named_needs_no_current_one(cluster, folder, tmp_path, monkeypatch):
    config = json.loads(cluster.config.read_text())
    del config["current-context"]
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    made = on_kubernetes(folder, context="here")
    assert made.collect(made.launch_replicas(1, "prog:add", [1]), timeout=30)[0].status == "succeeded"
    with pytest.raises(KubernetesError, match="no cluster is known here"):
        on_kubernetes(folder).launch_replicas(1, "prog:add", [1])


@pytest.mark.parametrize("wish, words", [
    ({"image": ""}, "image=''"), ({"image": "a b"}, "image='a b'"),
    ({"claim": None}, "claim=None, mount='/'"),
    ({"mount": "data"}, "mount='data'"), ({"gpus": "h100:2"}, "gpus='h100:2'"), ({"gpus": True}, "gpus=True"),
    ({"namespace": "My Team"}, "namespace='My Team'"), ({"gpu_kind": "a b"}, "'a b' is no name"),
    ({"node_labels": {"a b": "c"}}, "'a b' is no name"), ({"user": -1}, "user=-1"), ({"cpus": 0}, "cpus=0"),
    ({"begin_s": -1}, "begin_s=-1"), ({"labels": {"a b": "c"}}, "'a b' is no name"),
    ({"requeue": 1}, "requeue=1"), ({"poll_s": None}, "poll_s=None"),
])  # fmt: skip
def test_wishes_that_make_no_sense_are_refused_before_kubernetes(wish, words):
    with pytest.raises(ValueError, match=words):
        KubernetesOptions(**KUBERNETES | wish)


def test_each_wish_reaches_the_job(tmp_path):
    "No option is passed over."
    place = SharedPlace(tmp_path, tmp_path / "logs", "python", None, grace_s=5)
    lives = Submission(Task(Program("script", "train.py"), [], timeout=100), "0000000a", range(2, 4), 4, 3)
    made = lambda **wish: job_manifest(  # noqa: E731
        KubernetesOptions(**KUBERNETES | wish), lives, place, ["python", "entry.py"], 5
    )
    plain = made()
    assert plain["metadata"]["name"] == "replicas-0000000a-run3-rank2"
    assert launch_of(lives.number) == ("0000000a", 3, 2)
    assert job_name(lives.number) == plain["metadata"]["name"]
    assert plain["metadata"]["annotations"] == {"composer-nb/rank": "2"}
    pod = plain["spec"]["template"]["spec"]
    assert pod["activeDeadlineSeconds"] == 765 and pod["terminationGracePeriodSeconds"] == 15
    timed = made(time_limit_s=7, begin_s=3)["spec"]["template"]["spec"]
    assert timed["activeDeadlineSeconds"] == 10
    wishes = {
        "image": "other:1", "claim": "data", "gpus": 2, "gpu_kind": "amd.com/gpu", "cpus": 3, "memory_mb": 5,
        "node_labels": {"zone": "a"}, "user": 77, "requeue": True, "labels": {"queue": "a"}, "begin_s": 5.0,
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }  # fmt: skip
    for name, value in wishes.items():
        if name == "gpu_kind":
            assert made(gpus=1) != made(gpus=1, gpu_kind=value)
        else:
            assert made(**{name: value}) != plain, name
    for name in ("poll_s", "lag_s", "command_s", "namespace", "context"):  # the launcher's own
        assert made(**{name: "x" if name in ("namespace", "context") else 3.0}) == plain
    client = pytest.importorskip("kubernetes", reason=f"not run: {REMEDY}").client
    every = made(**wishes)
    api = client.ApiClient(client.Configuration(host="http://nowhere"))
    read = api.deserialize(json.dumps(every), "V1Job", "application/json")
    assert api.sanitize_for_serialization(read) == every


def test_indexes_of_a_status_are_read_as_they_are_written():
    for numbers in ([], [0], [0, 1, 2], [1, 3, 4, 9]):
        assert indexes(ranges(numbers)) == set(numbers)
    assert indexes(None) == set()
    assert matches({"a": "1", "b/c": "2"}, "a=1,b/c in (1,2)") and not matches({"a": "1"}, "a=1,b in (2)")


def test_a_pod_without_a_status_of_its_container_is_read():
    bare = {"metadata": {}, "spec": {}, "status": {"phase": "Failed"}}
    assert (pod_state(bare).state, pod_state(bare).exit_code) == ("FAILED", 0)
    bare["status"] = {"phase": "Running"}
    assert (pod_state(bare).state, pod_state(bare).seconds) == ("RUNNING", 0)
    bare["status"] = {"phase": "Pending"}
    assert pod_state(bare).reason == ""


def test_what_a_program_prints_stays_in_its_own_file(cluster, folder):
    made = on_kubernetes(folder)
    (handle,) = made.launch_replicas(1, "prog:add", [1])
    made.collect([handle], timeout=30)
    assert set(cluster.logs().values()) <= {""} and Path(handle.log).stat().st_mode & 0o077 == 0
