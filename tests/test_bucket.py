"""A bucket lets one writer win, tells what is wrong, and hands out no payload that it has not checked."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import inside, s3_client, s3_options  # noqa: F401
from safetensors.torch import save

from composer_nb.diloco.payload import (
    DamagedPayload,
    PayloadRef,
    UnexpectedPayload,
    pack,
    payload_metadata,
    read_payload,
    spec_of,
    write_payload,
)
from composer_nb.diloco.store import (
    BucketError,
    BucketFull,
    BucketReadOnly,
    BucketUnavailable,
    KeyNotFound,
    check_key,
    explain,
    open_bucket,
)
from composer_nb.diloco.store.folder import FolderStore, Root
from composer_nb.drills.damage import DAMAGE, RESEALABLE, damage, damage_drill
from composer_nb.drills.races import bytes_of, races, tally
from composer_nb.drills.s3_server import local_s3, losing

DELTA = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "scale": torch.tensor([0.5, 2.0]).bfloat16(),
    "packed": torch.arange(9, dtype=torch.uint8),
}


@pytest.fixture(params=["folder", "memory", "s3"])
def bucket(request, tmp_path):
    if request.param == "folder":
        return open_bucket(tmp_path / "bucket")
    if request.param == "memory":
        return open_bucket(f"memory://{uuid.uuid4().hex}")
    return inside(request.getfixturevalue("s3_client"), uuid.uuid4().hex)


# ---- the interface, the same on every store


def test_what_is_put_comes_back(bucket):
    bucket.check()
    bucket.put("a/b/1", b"one")
    bucket.put("a/b/1", b"two!")
    assert bucket.get("a/b/1") == b"two!" and bucket.size("a/b/1") == 4 and bucket.exists("a/b/1")
    assert bucket.list() == ["a/b/1"]


def test_only_the_first_creates(bucket):
    assert bucket.put_if_absent("k", b"first")
    assert not bucket.put_if_absent("k", b"second") and not bucket.put_if_absent("k", b"first")
    assert bucket.get("k") == b"first"
    bucket.delete("k")
    assert bucket.put_if_absent("k", b"third") and bucket.get("k") == b"third"


def test_what_put_wrote_is_there_for_put_if_absent(bucket):
    bucket.put("k", b"")
    assert not bucket.put_if_absent("k", b"late") and bucket.get("k") == b""


def test_list_is_sorted_and_takes_any_beginning(bucket):
    keys = ["r/10/x", "r/9", "r/1/a", "r/1/b", "s", "r.json", "r/1x"]
    for key in keys:
        bucket.put(key, b"")
    assert bucket.list() == sorted(keys)
    assert bucket.list("r/1") == ["r/1/a", "r/1/b", "r/10/x", "r/1x"]
    assert bucket.list("r/1/") == ["r/1/a", "r/1/b"]
    assert (
        bucket.list("r/1/b") == ["r/1/b"] and bucket.list("nothing/here/") == [] and bucket.list("r/9/") == []
    )


def test_a_corner_sees_its_own_keys_only(bucket):
    bucket.put("outside", b"x")
    corner = bucket.under("run-1").under("a")
    assert corner.put_if_absent("k", b"abc") and not corner.put_if_absent("k", b"")
    assert corner.list() == ["k"] and bucket.get("run-1/a/k") == b"abc" and corner.size("k") == 3
    assert (corner.bytes_up, corner.requests > 0, repr(corner).endswith("/run-1/a')")) == (3, True, True)
    corner.delete("k")
    assert bucket.list() == ["outside"]
    with pytest.raises(BucketError, match="no key"):
        bucket.under("../elsewhere")


def test_a_missing_key(bucket):
    bucket.put("folder/key", b"x")
    for key in ("nothing", "folder", "folder/other", "folder/key/below"):
        with pytest.raises(KeyNotFound, match=key):
            bucket.get(key)
        with pytest.raises(KeyError):
            bucket.size(key)
        assert not bucket.exists(key)
        bucket.delete(key)
    assert bucket.list() == ["folder/key"]


def test_counters(bucket):
    bucket.put("a", b"12345")
    bucket.put_if_absent("b", b"123")
    bucket.put_if_absent("b", b"1234567")
    bucket.get("a")
    assert (bucket.bytes_up, bucket.bytes_down, bucket.requests) == (8, 5, 4)


def test_any_bytes(bucket):
    everything = bytes(range(256)) * 5000
    bucket.put("k", bytearray(everything))
    assert bucket.get("k") == everything and isinstance(bucket.get("k"), bytes)
    with pytest.raises(TypeError, match="str"):
        bucket.put("k", "text")


BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    ".hidden",
    "a/.b",
    "a\\b",
    "a*",
    "a?b",
    "a b",
    "ä",
    "a\n",
    "a\0b",
    "x" * 900,
    "a@b",
]


def test_a_key_that_some_store_would_misread_is_refused(bucket):
    for key in [*BAD_KEYS, None, 3, b"a"]:
        for attempt in (
            bucket.get,
            bucket.exists,
            bucket.size,
            bucket.delete,
            lambda k: bucket.put(k, b""),
            lambda k: bucket.put_if_absent(k, b""),
        ):
            with pytest.raises(BucketError, match="is no key.*use parts"):
                attempt(key)
    assert bucket.list() == []


@given(st.text(alphabet="ab./\\-_ *", min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_no_key_leaves_the_folder(key):
    try:
        check_key(key)
    except BucketError:
        return
    assert os.path.normpath(os.path.join("/root", key)) == "/root/" + key


def test_a_wrong_prefix_is_refused(bucket):
    for prefix in ("../", "/a", "a//", "."):
        with pytest.raises(BucketError):
            bucket.list(prefix)


def test_a_key_below_a_key_is_an_error_in_a_folder(tmp_path):
    bucket = open_bucket(tmp_path)
    bucket.put("a/b", b"x")
    for attempt in (bucket.put, bucket.put_if_absent):
        with pytest.raises(BucketError, match="choose another key"):
            attempt("a", b"y")
        with pytest.raises(BucketError, match="choose another key"):
            attempt("a/b/c", b"y")
    assert bucket.list() == ["a/b"] and bucket.get("a/b") == b"x"


# ---- races


@pytest.mark.parametrize("where, n", [("folder", 300), ("s3", 60)])
def test_every_race_has_one_winner(where, n, tmp_path, request):
    options = request.getfixturevalue("s3_options") if where == "s3" else {}
    result = races(tmp_path if where == "folder" else "s3://tests", n, 4, **options)
    assert result.winners == (1,) * n
    assert (result.double_winners, result.without_winner, result.torn, result.misattributed) == (0, 0, 0, 0)
    assert open_bucket(tmp_path if where == "folder" else "s3://tests", **options).list("races/") == []


def test_a_second_winner_would_be_counted():
    mine, yours = bytes_of(0), bytes_of(1)
    told = [
        [(True, True), (True, True), (False, True), (False, False)],
        [(False, True), (True, True), (False, True), (True, True)],
    ]
    result = tally(told, [mine, yours, mine, mine], 1.0)
    assert result.winners == (1, 2, 0, 1)
    assert (result.double_winners, result.without_winner, result.torn, result.misattributed) == (1, 1, 1, 2)


def test_a_race_in_memory_is_refused():
    with pytest.raises(ValueError, match="memory of its own"):
        races("memory://x", 1)


def test_a_racer_that_fails_is_heard(tmp_path):
    with pytest.raises(BucketError, match="s3fs|no key|is not known"):
        races("hf://x", 1)


def together(n, action):
    barrier, results = threading.Barrier(n), [None] * n

    def run(i):
        barrier.wait(20)
        results[i] = action(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_race_too(bucket):
    for race in range(10):
        won = together(8, lambda i, key=f"k{race}": bucket.put_if_absent(key, b"%d" % i * 1000))
        assert won.count(True) == 1 and bucket.get(f"k{race}") == b"%d" % won.index(True) * 1000


def test_equal_bytes_have_one_winner(bucket):
    assert together(6, lambda i: bucket.put_if_absent("k", b"same")).count(True) == 1


def test_a_reader_never_meets_half_a_file(tmp_path):
    bucket, done, seen = open_bucket(tmp_path), threading.Event(), []

    def read():
        other = open_bucket(tmp_path)
        while not done.is_set():
            for key in other.list("k"):
                with suppress(KeyNotFound):  # deleted in between
                    seen.append(len(other.get(key)))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(40):
        bucket.put_if_absent(f"k{i % 4}", b"x" * 2_000_000)
        bucket.put(f"k{i % 4}", b"y" * 1_000_000)
        bucket.delete(f"k{i % 4}") if i % 3 == 0 else None
    done.set()
    reader.join()
    assert seen and set(seen) <= {1_000_000, 2_000_000}


def test_a_writer_killed_half_way_leaves_no_key(tmp_path):
    code = f"""
import os, signal
from composer_nb.diloco import store as room
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
room.open_bucket({str(tmp_path)!r}).put_if_absent("record", b"x" * 100_000)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    bucket = open_bucket(tmp_path)
    assert done.returncode == -9
    assert bucket.list() == [] and len(list(tmp_path.iterdir())) == 1
    assert bucket.put_if_absent("record", b"mine")
    assert bucket.sweep() == 0 and bucket.sweep(older_than_s=-1) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["record"]


def test_a_lost_answer_to_link_is_not_a_lost_race(tmp_path, monkeypatch):
    bucket, link = open_bucket(tmp_path), os.link

    def linked_but_told_otherwise(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(os, "link", linked_but_told_otherwise)
    assert bucket.put_if_absent("k", b"mine")
    assert not bucket.put_if_absent("k", b"mine")


# ---- answers that get lost on the way (real client, real server, a proxy between)


def through(options, method, script, **kwargs):
    return losing(options, method, script), {"attempts": 3, "timeout_s": 1.0} | kwargs


@pytest.mark.parametrize(
    "action",
    [
        "lose",
        "hang",
        "refuse",
        (503, "SlowDown"),
        (500, "InternalError"),
        (409, "ConditionalRequestConflict"),
    ],
)
def test_a_lost_answer_does_not_lose_the_race(s3_options, s3_client, action):  # noqa: F811
    key, (going, limits) = uuid.uuid4().hex, through(s3_options, "PUT", [action])
    with going as (server, options):
        bucket = open_bucket("s3://tests", **limits, **options)
        assert bucket.put_if_absent(key, b"same for all")
        assert server.seen.count("PUT") >= 2 and not server.script
    other = s3_client
    assert not other.put_if_absent(key, b"same for all") and other.get(key) == b"same for all"


def test_a_lost_answer_does_not_win_a_lost_race(s3_options, s3_client):  # noqa: F811
    key, (going, limits) = uuid.uuid4().hex, through(s3_options, "PUT", ["lose", "lose"])
    s3_client.put_if_absent(key, b"same for all")
    with going as (_, options):
        assert not open_bucket("s3://tests", **limits, **options).put_if_absent(key, b"same for all")


def test_a_refusal_in_other_words(s3_options, s3_client):  # noqa: F811
    """Some servers answer 412 without saying which condition failed, which s3fs does not take for
    FileExistsError.
    """
    key, (going, limits) = uuid.uuid4().hex, through(s3_options, "PUT", [(412, "PreconditionFailed")])
    s3_client.put_if_absent(key, b"theirs")
    with going as (server, options):
        assert not open_bucket("s3://tests", **limits, **options).put_if_absent(key, b"mine")
        assert server.seen == ["PUT", "HEAD"]


def test_many_keys_are_deleted_at_once_and_a_missing_one_is_fine(bucket):
    keys = [f"a/{i}" for i in range(5)]
    for key in keys:
        bucket.put(key, b"x")
    before = bucket.requests
    bucket.delete(*keys[:3], "a/none")
    assert bucket.requests == before + 1 and bucket.list() == keys[3:]
    bucket.delete()
    assert bucket.requests == before + 2  # the listing
    corner = bucket.under("a")
    corner.delete("3", "4", "5")
    assert bucket.list() == []
    with pytest.raises(BucketError, match="is no key"):
        bucket.delete("a/1", "../b")


def test_many_keys_are_one_request_to_s3(s3_options, s3_client):  # noqa: F811
    corner = uuid.uuid4().hex
    going, limits = through(s3_options, "PUT", [])
    with going as (server, options):
        bucket = open_bucket(f"s3://tests/{corner}", **limits, **options)
        for i in range(6):
            bucket.put(f"k{i}", b"x")
        server.seen.clear()
        bucket.delete(*(f"k{i}" for i in range(5)))
        assert len(server.seen) == 1 and bucket.list() == ["k5"]


def test_a_key_deleted_while_contended_is_asked_for_again(s3_options, s3_client):  # noqa: F811
    key, (going, limits) = uuid.uuid4().hex, through(s3_options, "HEAD", [(404, "NoSuchKey")])
    s3_client.put_if_absent(key, b"theirs")
    with going as (server, options):
        bucket = open_bucket("s3://tests", **limits, **options)
        assert (
            not bucket.put_if_absent(key, b"mine") and bucket.requests == 2 and server.seen.count("PUT") == 2
        )


@pytest.mark.parametrize("what", ["put", "get", "list"])
def test_other_operations_are_asked_again(s3_options, s3_client, what):  # noqa: F811
    key = uuid.uuid4().hex
    s3_client.put(key, b"x")
    going, limits = through(
        s3_options, "PUT" if what == "put" else "GET", ["refuse", (503, "SlowDown")], attempts=5
    )
    with going as (server, options):
        bucket = open_bucket("s3://tests", **limits, **options)
        result = {
            "put": lambda: bucket.put(key, b"y"),
            "get": lambda: bucket.get(key),
            "list": lambda: bucket.list(key),
        }[what]()
        assert not server.script and bucket.requests >= 2
    assert result == {"put": None, "get": b"x", "list": [key]}[what]


def test_asking_again_is_bounded(s3_options):  # noqa: F811
    going, limits = through(s3_options, "PUT", [(503, "SlowDown")] * 50)
    with (
        going as (server, options),
        pytest.raises(BucketUnavailable, match="SlowDown.*may have been stored") as caught,
    ):
        open_bucket("s3://tests", **limits, **options).put_if_absent("k", b"x")
    assert server.seen.count("PUT") == 3 and caught.value.key == "k"


def test_waiting_does_not_move_the_seed(s3_options):  # noqa: F811
    import random

    random.seed(7)
    expected = random.Random(7).random()
    going, limits = through(s3_options, "PUT", [(503, "SlowDown")])
    with going as (_, options):
        open_bucket("s3://tests", **limits, **options).put(uuid.uuid4().hex, b"x")
    assert random.random() == expected


def test_a_wrong_clock_is_named(s3_options):  # noqa: F811
    going, limits = through(s3_options, "PUT", [(403, "RequestTimeTooSkewed")])
    with going as (_, options), pytest.raises(BucketUnavailable, match="set this machine's clock"):
        open_bucket("s3://tests", **limits, **options).put("k", b"x")


def test_a_server_that_ignores_the_condition_is_found(s3_client, monkeypatch):  # noqa: F811
    bucket = inside(s3_client, uuid.uuid4().hex)
    pipe = bucket._store.fs.pipe_file
    monkeypatch.setattr(
        bucket._store.fs, "pipe_file", lambda *args, mode=None, **kwargs: pipe(*args, **kwargs)
    )
    with pytest.raises(BucketError, match="second writer won"):
        bucket.check()
    assert bucket.list() == []


def test_an_object_in_parts_is_created_once(s3_options):  # noqa: F811
    name = uuid.uuid4().hex
    bucket = open_bucket(f"s3://tests/{name}", part_bytes=5 * 2**20, **s3_options)
    mine, yours = os.urandom(11 * 2**20), bytes(11 * 2**20)
    assert (
        bucket.put_if_absent("k", mine) and not bucket.put_if_absent("k", yours) and bucket.get("k") == mine
    )
    parts = bucket._store.fs.call_s3("list_multipart_uploads", Bucket="tests")
    assert "Uploads" not in parts
    going, limits = through(s3_options, "POST", ["pass", "lose"], part_bytes=5 * 2**20, timeout_s=5.0)
    with going as (server, options):
        assert open_bucket(f"s3://tests/{name}", **limits, **options).put_if_absent("lost", mine)
        assert not server.script


def test_parts_race(s3_client):  # noqa: F811
    bucket = inside(s3_client, uuid.uuid4().hex)
    bucket._store.part_bytes = 5 * 2**20
    data = [bytes([i]) * (10 * 2**20) for i in range(3)]
    won = together(3, lambda i: bucket.put_if_absent("k", data[i]))
    assert won.count(True) == 1 and bucket.get("k") == data[won.index(True)]


def test_more_keys_than_one_page(s3_client, monkeypatch):  # noqa: F811
    bucket = inside(s3_client, uuid.uuid4().hex)
    call = bucket._store.fs.call_s3
    monkeypatch.setattr(
        bucket._store.fs, "call_s3", lambda *args, **kwargs: call(*args, MaxKeys=4, **kwargs)
    )  # S3's own page holds 1,000
    for i in range(11):
        bucket.put(f"k/{i:02d}", b"")
    assert bucket.list("k/") == [f"k/{i:02d}" for i in range(11)]


# ---- buckets that are wrong


SECRETS = [
    "s3://AKIA:hush@bucket/x",
    "s3://hush@bucket",
    "s3://bucket/x?X-Amz-Signature=hush",
    "gs://user:hush@bucket",
    "s3://bucket#hush",
]


@pytest.mark.parametrize("uri", SECRETS)
def test_a_uri_with_a_secret_is_refused_unseen(uri):
    with pytest.raises(BucketError, match="credentials belong in the environment") as caught:
        open_bucket(uri)
    assert "hush" not in str(caught.value) and "AKIA" not in repr(caught.value)


@pytest.mark.parametrize("option", ["endpoint_url", "client_kwargs"])
def test_an_endpoint_with_a_secret_is_refused_unseen(option):
    endpoint = "http://user:hush@127.0.0.1:9"
    options = (
        {"endpoint_url": endpoint}
        if option == "endpoint_url"
        else {"client_kwargs": {"endpoint_url": endpoint}}
    )
    with pytest.raises(BucketError, match="endpoint_url holds credentials") as caught:
        open_bucket("s3://bucket", **options)
    assert "hush" not in str(caught.value)


def test_a_secret_is_blotted_out():
    error = explain(OSError("key hush rejected"), "k", writes=True, where="s3://b", secrets=["hush"])
    assert "hush" not in str(error) and "***" in str(error)
    assert "practice-secret" not in repr(open_bucket("s3://bucket", key="k", secret="practice-secret"))


@pytest.mark.parametrize("uri, said", [
    ("hf://buckets/x", "hf:// is not known to let exactly one writer win.*s3://"),
    ("abfs://c/x", "memory://"),
    ("s3://UPPER", "no S3 bucket name"), ("s3://", "no key"), ("s3://bucket/../other", "no key"),
    ("s3://bucket//x", "no key"), ("", "names no folder"), ("simplecache::s3://b/x", "names no folder"),
    ("file://", "names no folder"),
])  # fmt: skip
def test_a_uri_that_will_not_do(uri, said):
    with pytest.raises(BucketError, match=said):
        open_bucket(uri)


@pytest.mark.parametrize("uri", ["bucket/prefix", "memory://x"])
def test_options_of_an_object_store_for_a_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BucketError, match="takes no endpoint_url, secret; write s3://") as caught:
        open_bucket(uri, endpoint_url="http://127.0.0.1:9", secret="hush")
    assert "hush" not in str(caught.value) and not any(tmp_path.iterdir())


def test_a_key_beside_keys_below_it_on_stores_without_folders(s3_client):  # noqa: F811
    for bucket in (open_bucket(f"memory://{uuid.uuid4().hex}"), inside(s3_client, uuid.uuid4().hex)):
        bucket.put("a/b", b"1")
        assert bucket.put_if_absent("a", b"2") and bucket.get("a") == b"2" and bucket.list() == ["a", "a/b"]


def test_a_scheme_that_nobody_knows():
    with pytest.raises(BucketError, match="not known to fsspec"):
        open_bucket("nowhere://x", unsafe=True)


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"timeout_s": 0}, {"part_bytes": 1}])
def test_a_setting_that_will_not_do(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        open_bucket("s3://bucket", **wrong)


def test_unsafe_lets_any_file_system_in():
    class Toy(MemoryFileSystem):
        protocol, store, pseudo_dirs = "toy", {}, [""]

    fsspec.register_implementation("toy", Toy, clobber=True)
    with pytest.raises(BucketError, match="toy://"):
        open_bucket("toy://x")
    bucket = open_bucket("toy://x", unsafe=True)
    bucket.check()
    bucket.put("a/b", b"1")
    assert bucket.list("a/") == ["a/b"] and bucket.get("a/b") == b"1" and not bucket.exists("a/c")


@contextmanager
def as_nobody():
    """The rights of an ordinary user, also where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def locked_folder():
    """A folder with one object in it that this user may read and not write."""
    folder = Path(tempfile.mkdtemp())
    (folder / "k").write_bytes(b"x")
    os.chmod(folder, 0o555)
    yield folder
    os.chmod(folder, 0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_refused_when_opened(locked_folder):
    with as_nobody(), pytest.raises(BucketReadOnly, match="let this identity write"):
        open_bucket(locked_folder)


def test_a_folder_that_becomes_read_only(locked_folder):
    os.chmod(locked_folder, 0o777)
    with as_nobody():
        bucket = open_bucket(locked_folder)
    os.chmod(locked_folder, 0o555)
    with as_nobody():
        assert bucket.get("k") == b"x"
        for attempt in (
            lambda: bucket.put("k", b"y"),
            lambda: bucket.put_if_absent("n", b""),
            lambda: bucket.delete("k"),
            bucket.check,
        ):
            with pytest.raises(BucketReadOnly) as caught:
                attempt()
        assert caught.value.remedy and caught.value.key


@contextmanager
def one_megabyte(folder: Path, how: str):
    """A folder on a file system of 1 MB where one can be mounted, else a limit of 1 MB per file."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if (
        how == "disk"
        and os.geteuid() == 0
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    ):
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    else:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_full_disk(how, tmp_path):
    with one_megabyte(tmp_path, how):
        bucket = open_bucket(tmp_path)
        bucket.put("small", b"x" * 1000)
        for attempt in (bucket.put, bucket.put_if_absent):
            with pytest.raises(BucketFull, match="free some space.*nothing was left half written") as caught:
                attempt("big", b"x" * 3_000_000)
            assert caught.value.key == "big"
        assert bucket.list() == ["small"] and [p.name for p in tmp_path.iterdir()] == ["small"]
        bucket.check()


def test_a_folder_that_vanishes_is_not_an_empty_one(tmp_path):
    bucket = open_bucket(tmp_path / "b")
    bucket.put("k", b"x")
    shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    attempts = [lambda: bucket.get("k"), lambda: bucket.exists("k"), lambda: bucket.list(),
                lambda: bucket.put("k", b""), lambda: bucket.put_if_absent("n/m", b""),
                lambda: bucket.delete("k")]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(BucketUnavailable, match="has gone or was replaced"):
            attempt()
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").mkdir()  # an empty mount point
    with pytest.raises(BucketUnavailable):
        bucket.put("k", b"")
    assert not any((tmp_path / "b").iterdir())


@pytest.mark.parametrize("write", ["put", "create", "move"])
def test_a_folder_that_vanishes_in_the_middle_of_a_write_is_not_made_anew(tmp_path, monkeypatch, write):
    """The moment between the look at the folder and the write: a mount drops there, and comes back later."""
    store = FolderStore(str(tmp_path / "b"))
    store.put("old", b"x")
    find = Root.path_to_write

    def find_and_lose(root, key):
        path = find(root, key)
        (tmp_path / "b").rename(tmp_path / "elsewhere")
        return path

    monkeypatch.setattr(Root, "path_to_write", find_and_lose)
    attempts = {"put": lambda: store.put("run/7/k", b"new"),
                "create": lambda: store.create("run/7/k", b"new", ""),
                "move": lambda: store.move("old", "run/7/k")}  # fmt: skip
    with pytest.raises(BucketUnavailable, match="has gone or was replaced"):
        attempts[write]()
    assert not (tmp_path / "b").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    monkeypatch.undo()
    store.put("run/7/k", b"newer")
    assert store.get("run/7/k") == b"newer" and store.get("old") == b"x"


def test_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BucketError, match="has no hard links.*another file system"):
        open_bucket(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_that_overwrite(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda source, target: shutil.copy(source, target))
    with pytest.raises(BucketError, match="replaces a file"):
        open_bucket(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BucketError):
        open_bucket(tmp_path / "file")


def test_foreign_files_are_not_keys(tmp_path):
    (tmp_path / "my notes.txt").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    bucket = open_bucket(tmp_path)
    bucket.put("k", b"")
    assert bucket.list() == ["k"]


def test_an_s3_bucket_that_is_not_there(s3_options):  # noqa: F811
    bucket = open_bucket("s3://never-made", **s3_options)
    attempts = [lambda: bucket.get("k"), lambda: bucket.exists("k"), lambda: bucket.list(),
                lambda: bucket.put("k", b""), lambda: bucket.put_if_absent("k", b""),
                lambda: bucket.delete("k"), bucket.check]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(BucketUnavailable, match="never-made.*NoSuchBucket.*create it"):
            attempt()


def test_no_credentials(s3_options, monkeypatch, tmp_path):  # noqa: F811
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    bucket = open_bucket("s3://tests", endpoint_url=s3_options["endpoint_url"])
    with pytest.raises(BucketUnavailable, match="NoCredentialsError.*give valid credentials"):
        bucket.put("k", b"")
    assert bucket.requests == 1


def test_nobody_answers():
    bucket = open_bucket(
        "s3://bucket",
        endpoint_url="http://127.0.0.1:9",
        key="k",
        secret="practice-secret",
        attempts=2,
        timeout_s=0.5,
    )
    start = time.monotonic()
    with pytest.raises(BucketUnavailable, match="check network and endpoint") as caught:
        bucket.get("k")
    assert (
        time.monotonic() - start < 10 and bucket.requests == 2 and "practice-secret" not in str(caught.value)
    )


def call(options, service, method, **kwargs):
    import boto3

    keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
    client = boto3.client(service, endpoint_url=options["endpoint_url"], region_name="us-east-1", **keys)
    return getattr(client, method)(**kwargs)


def test_wrong_keys_and_a_reader_that_writes():
    """moto with its own access control switched on: a user who may read, a wrong secret, an unknown user."""
    with local_s3("guarded") as options:
        open_bucket("s3://guarded", **options).put("k", b"x")
        call(options, "iam", "create_user", UserName="reader")
        keys = call(options, "iam", "create_access_key", UserName="reader")["AccessKey"]
        policy = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}],
        }
        call(
            options,
            "iam",
            "put_user_policy",
            UserName="reader",
            PolicyName="p",
            PolicyDocument=json.dumps(policy),
        )
        urllib.request.urlopen(
            urllib.request.Request(
                options["endpoint_url"] + "/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
            )
        )
        reader = options | {"key": keys["AccessKeyId"], "secret": keys["SecretAccessKey"]}
        bucket = open_bucket("s3://guarded", **reader)
        assert bucket.get("k") == b"x" and bucket.list() == ["k"]
        for attempt in (bucket.put, bucket.put_if_absent):
            with pytest.raises(BucketReadOnly, match="AccessDenied.*let this identity write"):
                attempt("n", b"")
        with pytest.raises(BucketReadOnly, match="AccessDenied.*let this identity write"):
            bucket.delete("k", "n")
        assert bucket.get("k") == b"x"
        for wrong in ({"secret": "hush-hush"}, {"key": "AKIAUNKNOWN"}):
            with pytest.raises(BucketUnavailable, match="give valid credentials") as caught:
                open_bucket("s3://guarded", **reader | wrong).put_if_absent("n", b"")
            assert "hush" not in str(caught.value)


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(BucketFull("full", "k", "make room")))
    assert (type(error), error.key, error.remedy, str(error)) == (
        BucketFull,
        "k",
        "make room",
        "full; make room",
    )
    damaged = pickle.loads(pickle.dumps(DamagedPayload("cut", "0" * 64, "size", "q")))
    assert (damaged.reason, damaged.quarantined, str(damaged)) == (
        "size",
        "q",
        "payload 000000000000: cut; moved to q",
    )


def test_a_process_that_only_moves_bytes_loads_no_torch(tmp_path):
    code = f"""
import sys
from composer_nb.diloco.store import open_bucket
open_bucket({str(tmp_path)!r}).check()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- payloads


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
def test_a_payload_comes_back_bit_for_bit(dtype, shape):
    bucket = open_bucket(f"memory://{uuid.uuid4().hex}")
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = read_payload(bucket, write_payload(bucket, {"t": tensor}), expect={"t": (shape, dtype)})["t"]
    assert back.dtype == dtype and back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_payload_on_every_store(bucket):
    ref = write_payload(bucket, DELTA, {"replica": "3", "note": "ä"})
    ref = PayloadRef.from_dict(json.loads(json.dumps(ref.to_dict())))
    back = read_payload(bucket, ref, expect=spec_of(DELTA))
    assert all(torch.equal(back[name], DELTA[name]) for name in DELTA) and back.keys() == DELTA.keys()
    assert payload_metadata(bucket.get(ref.key)) == {"replica": "3", "note": "ä"}
    assert bucket.list() == [ref.key] and ref.size == bucket.size(ref.key)


def test_views_shared_memory_and_gradients():
    bucket = open_bucket(f"memory://{uuid.uuid4().hex}")
    flat = torch.arange(12.0, requires_grad=True)
    parts = {
        "a": flat[:6],
        "b": flat[6:].view(2, 3),
        "tied": flat[:6],
        "t": flat.view(3, 4).t(),
        "every": flat[::2],
        "whole": flat,
    }
    back = read_payload(bucket, write_payload(bucket, parts))
    assert all(torch.equal(back[name], parts[name]) for name in parts)
    assert not back["a"].requires_grad


def test_equal_content_has_one_name():
    metadata = {str(i): "x" for i in range(12)}
    packed = {pack(dict(reversed(DELTA.items())), dict(reversed(metadata.items()))) for _ in range(20)} | {
        pack(DELTA, metadata)
    }
    assert len(packed) == 1
    assert pack(DELTA, {"a": "b"}) != pack(DELTA)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
def test_what_is_not_finite_is_not_shared(value, dtype):
    bucket, tensor = open_bucket(f"memory://{uuid.uuid4().hex}"), torch.zeros(5)
    tensor[3] = value
    with pytest.raises(ValueError, match="not finite: weight; this replica diverged"):
        write_payload(bucket, {"weight": tensor.to(dtype)})
    assert bucket.list() == []
    ref = write_payload(bucket, {"weight": tensor.to(dtype)}, finite=False)
    assert not read_payload(bucket, ref, finite=False)["weight"].float().isfinite().all()
    with pytest.raises(DamagedPayload, match="not finite: weight"):
        read_payload(bucket, ref)


def test_large_finite_numbers_are_finite():
    bucket = open_bucket(f"memory://{uuid.uuid4().hex}")
    large = {"h": torch.full((9,), 65504.0).half(), "f": torch.full((9,), 3e38), "e": torch.empty(0)}
    assert read_payload(bucket, write_payload(bucket, large))["f"][0] == large["f"][0]


def test_nothing_is_no_payload():
    with pytest.raises(ValueError, match="at least one tensor"):
        write_payload(open_bucket("memory://empty"), {})


def test_no_damage_is_taken(bucket):
    rows = damage_drill(bucket, DELTA, 105 if "memory" in repr(bucket) else 42, seed=11)
    assert [row for row in rows if row["taken"] or not row["reason"]] == []
    assert {row["kind"] for row in rows} == set(DAMAGE)
    reasons = {(row["kind"], row["way"]): row["reason"] for row in rows}
    assert [
        reasons[kind, "resealed"]
        for kind in ("nan", "wrong_shape", "wrong_dtype", "missing_key", "extra_key")
    ] == ["nonfinite"] + ["spec"] * 4
    assert (
        reasons["oversized", "replaced"] == "size"
        and reasons["bit_flip", "replaced"] == reasons["wrong_hash", "replaced"] == "hash"
    )


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_damage_and_repeats(kind):
    data = pack(DELTA)
    assert damage(data, kind, 1) == damage(data, kind, 1) != data
    assert len({damage(data, kind, seed) for seed in range(20)}) > 1 or kind in (
        "wrong_hash",
        "missing_key",
        "extra_key",
        "stale",
        "wrong_dtype",
    )


def test_an_unknown_damage():
    with pytest.raises(ValueError, match="unknown damage 'rust'; known: bit_flip"):
        damage(pack(DELTA), "rust", 0)
    assert set(RESEALABLE) < set(DAMAGE)


def test_an_oversized_object_is_not_downloaded(bucket):
    ref = write_payload(bucket, DELTA)
    bucket.put(ref.key, bytes(10**6))
    down = bucket.bytes_down
    with pytest.raises(DamagedPayload, match="1000000 bytes, .* announced") as caught:
        read_payload(bucket, ref)
    assert bucket.bytes_down == down and bucket.list() == [caught.value.quarantined] == [
        f"quarantine/{ref.sha256}.size"
    ]


def test_a_damaged_payload_can_be_mended(bucket):
    ref = write_payload(bucket, DELTA)
    bucket.put(ref.key, damage(bucket.get(ref.key), "bit_flip", 3))
    assert write_payload(bucket, DELTA) == ref
    assert torch.equal(read_payload(bucket, ref)["weight"], DELTA["weight"])


@pytest.mark.parametrize("change", [
    {"weight": ((4, 3), torch.float32)}, {"weight": ((3, 4), torch.float64)}, {"bias": ((1,), torch.float32)},
    {"scale": None},
])  # fmt: skip
def test_another_model_is_told_and_takes_nothing_away(change):
    bucket = open_bucket(f"memory://{uuid.uuid4().hex}")
    ref = write_payload(bucket, DELTA)
    expect = {name: want for name, want in {**spec_of(DELTA), **change}.items() if want}
    with pytest.raises(UnexpectedPayload, match=f"{next(iter(change))}.*runs another model") as caught:
        read_payload(bucket, ref, expect=expect)
    assert caught.value.quarantined is None and bucket.list() == [ref.key]
    assert read_payload(bucket, ref, expect={n: (list(t.shape), str(t.dtype)) for n, t in DELTA.items()})


def test_a_missing_payload(bucket):
    with pytest.raises(KeyNotFound):
        read_payload(bucket, PayloadRef("0" * 64, 3, {}))


def test_damage_in_a_read_only_bucket_is_still_not_taken(tmp_path, monkeypatch):
    bucket = open_bucket(tmp_path)
    ref = write_payload(bucket, DELTA)
    bucket.put(ref.key, b"short")

    def refuse(*_):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(DamagedPayload) as caught:
        read_payload(bucket, ref)
    assert caught.value.quarantined is None


def test_two_readers_of_one_damaged_payload(tmp_path):
    bucket = open_bucket(tmp_path)
    ref = write_payload(bucket, DELTA)
    bucket.put(ref.key, b"x" * ref.size)
    results = together(4, lambda i: pytest.raises((DamagedPayload, KeyNotFound), read_payload, bucket, ref))
    assert len(results) == 4 and bucket.list() == [f"quarantine/{ref.sha256}.hash"]


@pytest.mark.parametrize("record", [
    {}, {"sha256": "../../etc", "size": 1, "spec": {}}, {"sha256": "0" * 64, "size": -1, "spec": {}},
    {"sha256": "0" * 64, "size": "9", "spec": {}}, {"sha256": "0" * 64, "size": True, "spec": {}},
    {"sha256": "A" * 64, "size": 1, "spec": {}}, {"sha256": "0" * 64, "size": 1, "spec": []},
    {"sha256": "0" * 64, "size": 1, "spec": {"a": [3]}}, {"sha256": "0" * 64, "size": 1, "spec": {"a": 3}},
    {"sha256": None, "size": 1, "spec": {}},
])  # fmt: skip
def test_a_record_that_is_no_reference(record):
    with pytest.raises(ValueError):
        PayloadRef.from_dict(record)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\x05\0\0\0\0\0\0\0{}",
        save({"weight": torch.zeros(3)})[:8],
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_bytes_that_are_no_safetensors(data):
    import hashlib

    bucket, ref = (
        open_bucket(f"memory://{uuid.uuid4().hex}"),
        PayloadRef(hashlib.sha256(data).hexdigest(), len(data), spec_of(DELTA)),
    )
    bucket.put(ref.key, data)
    with pytest.raises(DamagedPayload, match="not safetensors|missing") as caught:
        read_payload(bucket, ref)
    assert caught.value.quarantined


def test_memory_stays_within_about_two_copies(tmp_path):
    """Peak memory of a fresh process while it writes and reads 128 MB, above what it held before."""
    code = f"""
import threading, time, torch
from composer_nb.diloco.payload import read_payload, write_payload
from composer_nb.diloco.store import open_bucket
import safetensors.torch
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def peak(action):
    before, top, done = rss(), [0], threading.Event()
    def watch():
        while not done.is_set():
            top[0] = max(top[0], rss())
            time.sleep(.002)
    watcher = threading.Thread(target=watch); watcher.start()
    result = action(); done.set(); watcher.join()
    return result, (top[0] - before) / 128
bucket = open_bucket({str(tmp_path)!r})
warm = write_payload(bucket, {{"w": torch.zeros(8)}}); read_payload(bucket, warm)
tensors = {{f"t{{i}}": torch.ones(4 * 2**20) for i in range(8)}}
ref, wrote = peak(lambda: write_payload(bucket, tensors))
back, read = peak(lambda: read_payload(bucket, ref))
print(wrote, read)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wrote, read = map(float, done.stdout.split())
    assert wrote < 2.3 and read < 2.3
