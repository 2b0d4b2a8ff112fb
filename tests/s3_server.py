"""Fixtures: one S3 server for all tests, and buckets inside it."""

from collections.abc import Iterator

import pytest

from composer_nb.diloco.store import Bucket, open_bucket
from composer_nb.drills.s3_server import local_s3


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict]:
    """Storage options of a server with an empty bucket named `tests`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with local_s3("tests") as options:
            yield options


@pytest.fixture(scope="session")
def s3_client(s3_options: dict) -> Bucket:
    """The bucket `tests` itself: making a client takes longer than most tests."""
    return open_bucket("s3://tests", **s3_options)


def inside(bucket: Bucket, prefix: str) -> Bucket:
    """A bucket of its own below a prefix, through the same client."""
    store = type(bucket._store)(bucket._store.fs, f"tests/{prefix}", bucket._store.part_bytes)
    return Bucket(store, f"s3://tests/{prefix}", attempts=bucket._attempts)
