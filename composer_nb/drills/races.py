"""Processes that race for keys of a bucket, and the count of who was told that they won."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import fsspec

from composer_nb.diloco.store import open_bucket, split_uri

Claim = Callable[[str, bytes], bool]
Way = Literal["bucket", "fsspec", "obstore"]


@dataclass(frozen=True)
class Races:
    """What races for one key each came to. `winners` has one count per race."""

    winners: tuple[int, ...]
    torn: int  # reads that met neither all the bytes of one racer
    misattributed: int  # races that ended with the bytes of somebody who was not told to have won
    seconds: float

    @property
    def double_winners(self) -> int:
        """Races in which more than one caller was told that it won."""
        return sum(count > 1 for count in self.winners)

    @property
    def without_winner(self) -> int:
        return sum(count == 0 for count in self.winners)


def races(
    uri: str | os.PathLike[str],
    n_races: int,
    n_processes: int = 4,
    *,
    way: Way = "bucket",
    **storage_options: Any,
) -> Races:
    """Let `n_processes` processes race for each of `n_races` fresh keys of a bucket. Keys are removed
    afterwards.

    `way` is how a racer claims a key: `bucket` is `Bucket.put_if_absent`, `fsspec` fsspec's own
    `pipe_file(mode="create")`, `obstore` its `put(mode="create")` (s3:// only). The processes are spawned, so
    a script calls this under `if __name__ == "__main__":`. Raises ValueError for a memory bucket, which no
    other process sees.
    """
    if split_uri(uri)[0] == "memory":
        raise ValueError("each process has a memory of its own: race on a folder or on s3://, or use threads")
    if way not in _CLAIMS:
        raise ValueError(f"way is {way!r}: one of {', '.join(_CLAIMS)}")
    bucket, token = open_bucket(uri, **storage_options), f"races/{uuid.uuid4().hex}"
    bucket.put(f"{token}/start", b"")
    spawn, start = multiprocessing.get_context("spawn"), perf_counter()
    with ProcessPoolExecutor(
        n_processes, spawn, initializer=_set_barrier, initargs=(spawn.Barrier(n_processes),)
    ) as pool:
        jobs = [
            pool.submit(_race, os.fspath(uri), storage_options, way, token, rank, n_races)
            for rank in range(n_processes)
        ]
        results = [job.result() for job in jobs]
    seconds = perf_counter() - start
    final = [bucket.get(f"{token}/{i:06d}") for i in range(n_races)]
    for key in bucket.list(token):
        bucket.delete(key)
    return tally(results, final, seconds)


def tally(results: Sequence[Sequence[tuple[bool, bool]]], final: Sequence[bytes], seconds: float) -> Races:
    """Results are per rank and race: was I told that I won, and did I read whole bytes right after."""
    won = [[claimed for claimed, _ in row] for row in results]
    winners = tuple(map(sum, zip(*won)))
    owners = [
        next((rank for rank in range(len(won)) if content == bytes_of(rank)), None) for content in final
    ]
    astray = sum(owner is None or not won[owner][i] for i, owner in enumerate(owners))
    return Races(winners, sum(not whole for row in results for _, whole in row), astray, seconds)


def bytes_of(rank: int) -> bytes:
    """What a racer offers: four kilobytes that name it."""
    return f"{rank:04d}".encode() * 1024


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _race(
    uri: str, options: Mapping[str, Any], way: Way, token: str, rank: int, n_races: int
) -> list[tuple[bool, bool]]:
    """One racer's process."""
    bucket, whole, outcome = open_bucket(uri, **options), {bytes_of(other) for other in range(100)}, []
    claim = _CLAIMS[way](uri, options)
    try:
        for i in range(n_races):
            key = f"{token}/{i:06d}"
            _barrier.wait(120)
            won = claim(key, bytes_of(rank))
            outcome.append((won, bucket.get(key) in whole))
    except BaseException:
        _barrier.abort()  # the others need not wait for this one
        raise
    return outcome


def _bucket_claim(uri: str, options: Mapping[str, Any]) -> Claim:
    return open_bucket(uri, **options).put_if_absent


def _fsspec_claim(uri: str, options: Mapping[str, Any]) -> Claim:
    fs, root = fsspec.url_to_fs(uri, **options)

    def claim(key: str, data: bytes) -> bool:
        try:
            fs.pipe_file(f"{root}/{key}", data, mode="create")
        except FileExistsError:
            return False
        return True

    return claim


def obstore_client(uri: str, options: Mapping[str, Any]) -> Any:
    """obstore's S3 client for the storage options of `local_s3`; needs `obstore`. Asks once, as ours does."""
    from datetime import timedelta

    from obstore.store import S3Store

    return S3Store.from_url(
        uri, endpoint=options["endpoint_url"],
        access_key_id=options["key"], secret_access_key=options["secret"],
        region="us-east-1", client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=20)},
    )  # fmt: skip


def _obstore_claim(uri: str, options: Mapping[str, Any]) -> Claim:
    import obstore
    from obstore.exceptions import AlreadyExistsError

    client = obstore_client(uri, options)

    def claim(key: str, data: bytes) -> bool:
        try:
            obstore.put(client, key, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    return claim


_CLAIMS: dict[str, Callable[[str, Mapping[str, Any]], Claim]] = {
    "bucket": _bucket_claim, "fsspec": _fsspec_claim, "obstore": _obstore_claim,
}  # fmt: skip
