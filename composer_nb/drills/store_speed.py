"""Two S3 clients against one server: our store over s3fs, and obstore; which of many writers wins, and what it takes.

`python -m composer_nb.drills.store_speed [--write]` needs `obstore`; `--write` keeps the result in `store_speed.json`.
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

IMPORTS = {"s3fs": "import s3fs", "obstore": "import obstore.store"}


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
        "replace": (lambda i: ours.put(f"k{i}", data), lambda i: obstore.put(theirs, f"k{i}", data, use_multipart=False)),
        "get": (lambda i: ours.get(f"k{i}"), lambda i: obstore.get(theirs, f"k{i}").bytes()),
        "size": (lambda i: ours.size(f"k{i}"), lambda i: obstore.head(theirs, f"k{i}")["size"]),
        "list": (lambda i: ours.list("k"), lambda i: obstore.list(theirs, "k").collect()),
        "delete": (lambda i: ours.delete(f"k{i}"), lambda i: obstore.delete(theirs, f"k{i}")),
        "put 32 MB": (lambda i: ours.put("large", large), lambda i: obstore.put(theirs, "large", large, use_multipart=False)),
        "get 32 MB": (lambda i: ours.get("large"), lambda i: bytes(obstore.get(theirs, "large").bytes())),
    }
    rows = [{"operation": "start the client", **{f"{name} (ms)": _import_ms(code) for name, code in IMPORTS.items()}}]
    for name, actions in pairs.items():
        count = 5 if "MB" in name else tries
        times = [[_ms(lambda i=i, act=action: act(i)) for i in range(count)] for action in actions]
        medians = [statistics.median(row) for row in times]
        rows.append({"operation": name, "s3fs (ms)": medians[0], "obstore (ms)": medians[1]})
    for key in ("large",):
        ours.delete(key)
        obstore.delete(theirs, key)
    return rows


def lost_answers(options: Mapping[str, Any], bucket: str, tries: int = 5) -> dict[str, tuple[int, int]]:
    """The only writer of a key loses the answer and asks once more: wins that it learns of, and tries, per client.

    Ours finds its mark in the metadata. obstore's `put` by itself has nothing to find.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    kept = {"bucket": 0, "obstore": 0}
    for _ in range(tries):
        key = uuid.uuid4().hex
        with losing(options, "PUT", ["lose"]) as (_, through):
            ours = open_bucket(f"s3://{bucket}/lost", attempts=2, timeout_s=5.0, **through)
            with suppress(BucketError):  # then it is not kept
                kept["bucket"] += ours.put_if_absent(key, b"x")
        with losing(options, "PUT", ["lose"]) as (_, through):
            client = obstore_client(f"s3://{bucket}/lost-too", through)
            for _ in range(2):
                try:
                    obstore.put(client, key, b"x", mode="create")
                    kept["obstore"] += 1
                    break
                except AlreadyExistsError:
                    break
                except BaseError:
                    continue
    return {name: (count, tries) for name, count in kept.items()}


def _ms(action: Callable[[], Any]) -> float:
    start = perf_counter()
    action()
    return 1000 * (perf_counter() - start)


def _import_ms(code: str) -> float:
    """Best of three fresh interpreters, above what an empty one takes."""
    runs = [[_ms(lambda c=c: subprocess.run([sys.executable, "-c", c], check=True)) for _ in range(3)] for c in (code, "pass")]
    return min(runs[0]) - min(runs[1])


def contest(options: Mapping[str, Any], bucket: str, n_races: int = 40) -> list[dict[str, Any]]:
    """Four processes race for each key, by either client; one row per client."""
    kept, rows = lost_answers(options, bucket), []
    for way, name in (("bucket", "s3fs, put_if_absent"), ("obstore", "obstore, put create")):
        found, (won, tries) = races(f"s3://{bucket}/races", n_races, way=way, **options), kept[way]
        rows.append({
            "client": name, "races": n_races, "double winners": found.double_winners,
            "no winner": found.without_winner, "wins kept of lost answers": f"{won} of {tries}",
        })  # fmt: skip
    return rows


def main() -> None:
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with local_s3("speed") as options:
        found = {
            "started": started, "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "versions": {name: version(name) for name in ("s3fs", "obstore", "moto")},
            "contest": contest(options, "speed"), "speed": small_operations(options, "speed"),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
