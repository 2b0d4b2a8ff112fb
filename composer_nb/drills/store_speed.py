"""Two S3 clients against one server: our store over s3fs, and obstore; which of many writers wins, and what
it takes.

`python -m composer_nb.drills.store_speed [--write]` needs `obstore`; `--write` keeps the result in
`store_speed.json`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from composer_nb.diloco.store import BucketError, open_bucket
from composer_nb.drills.races import obstore_client, races
from composer_nb.drills.s3_server import local_s3, losing

IMPORTS = {"s3fs": "s3fs", "obstore": "obstore.store"}


def small_operations(options: Mapping[str, Any], bucket: str, tries: int = 40) -> list[dict[str, Any]]:
    """Median milliseconds per operation on 1 KB objects, both clients in turn. One row per operation."""
    import obstore

    top = f"speed-{uuid.uuid4().hex}"
    ours = open_bucket(f"s3://{bucket}/{top}-a", **options)
    theirs = obstore_client(f"s3://{bucket}/{top}-b", options)
    data, large = bytes(1024), bytes(32 * 2**20)
    pairs: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
        "create": (
            lambda i: ours.put_if_absent(f"k{i}", data),
            lambda i: obstore.put(theirs, f"k{i}", data, mode="create", use_multipart=False),
        ),
        "replace": (
            lambda i: ours.put(f"k{i}", data),
            lambda i: obstore.put(theirs, f"k{i}", data, use_multipart=False),
        ),
        "get": (lambda i: ours.get(f"k{i}"), lambda i: obstore.get(theirs, f"k{i}").bytes()),
        "size": (lambda i: ours.size(f"k{i}"), lambda i: obstore.head(theirs, f"k{i}")["size"]),
        "list": (lambda i: ours.list("k"), lambda i: obstore.list(theirs, "k").collect()),
        "delete": (lambda i: ours.delete(f"k{i}"), lambda i: obstore.delete(theirs, f"k{i}")),
        "put 32 MB": (
            lambda i: ours.put("large", large),
            lambda i: obstore.put(theirs, "large", large, use_multipart=False),
        ),
        "get 32 MB": (lambda i: ours.get("large"), lambda i: bytes(obstore.get(theirs, "large").bytes())),
    }
    rows = [
        {"operation": "import", **{f"{name} (ms)": _import_ms(module) for name, module in IMPORTS.items()}}
    ]
    for name, actions in pairs.items():
        count = 5 if "MB" in name else tries
        times = [
            [_ms(lambda i=i, act=action: act(i)) for action in actions] for i in range(count)
        ]  # by turns
        medians = [statistics.median(column) for column in zip(*times)]
        rows.append({"operation": name, "s3fs (ms)": medians[0], "obstore (ms)": medians[1]})
    ours.delete("large")
    obstore.delete(theirs, "large")
    return rows


def lost_answers(options: Mapping[str, Any], bucket: str, tries: int = 5) -> dict[str, tuple[int, int]]:
    """The only writer of a key loses the answer and asks once more: wins that it learns of, and tries, per
    client.

    `bucket` finds its mark in the metadata. `obstore` is its `put` alone, `obstore, marked` the same mark put
    into its attributes and read back by hand.
    """
    kept = dict.fromkeys(("bucket", "obstore", "obstore, marked"), 0)
    for _ in range(tries):
        key = uuid.uuid4().hex
        for way in kept:
            with losing(options, "PUT", ["lose"]) as (_, through):
                kept[way] += _wins(way, f"s3://{bucket}/lost-{way[-3:]}", key, through)
    return {way: (count, tries) for way, count in kept.items()}


def _wins(way: str, uri: str, key: str, options: Mapping[str, Any]) -> bool:
    """Whether the caller learns that it won, when it may ask twice."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    if way == "bucket":
        with suppress(BucketError):
            return open_bucket(uri, attempts=2, timeout_s=5.0, **options).put_if_absent(key, b"x")
        return False
    client, mark = obstore_client(uri, options), uuid.uuid4().hex
    for _ in range(2):
        try:
            obstore.put(client, key, b"x", mode="create", attributes={"writer": mark})
            return True
        except AlreadyExistsError:
            return way == "obstore, marked" and obstore.get(client, key).attributes.get("writer") == mark
        except BaseError:
            continue
    return False


def _ms(action: Callable[[], Any]) -> float:
    start = perf_counter()
    action()
    return 1000 * (perf_counter() - start)


def _import_ms(module: str) -> float:
    """Best of three fresh interpreters."""
    code = f"from time import perf_counter as s; t = s(); import {module}; print(1000 * (s() - t))"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3))


def contest(options: Mapping[str, Any], bucket: str, n_races: int = 40) -> list[dict[str, Any]]:
    """Four processes race for each key, by either client; one row per client."""
    kept, rows = lost_answers(options, bucket), []
    ways = {"bucket": "s3fs, put_if_absent", "obstore": "obstore, put create"}
    for way, name in ways.items():
        found, (won, tries) = races(f"s3://{bucket}/races", n_races, way=way, **options), kept[way]
        rows.append({
            "client": name, "races": n_races, "double winners": found.double_winners,
            "no winner": found.without_winner, "wins kept of lost answers": f"{won} of {tries}",
        })  # fmt: skip
    won, tries = kept["obstore, marked"]
    marked = {"client": "obstore, with our mark", "wins kept of lost answers": f"{won} of {tries}"}
    return [*rows, rows[1] | marked]


def main() -> None:
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with local_s3("speed") as options:
        found = {
            "started": started,
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "versions": {name: version(name) for name in ("s3fs", "obstore", "moto")},
            "contest": contest(options, "speed"), "speed": small_operations(options, "speed"),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
