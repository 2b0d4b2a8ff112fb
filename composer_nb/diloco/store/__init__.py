"""Bytes under keys that replicas share, where exactly one writer of a key wins: a folder, memory, or an object store."""

from composer_nb.diloco.store.bucket import Bucket, DryBucket, ReadableBucket, open_bucket, split_uri
from composer_nb.diloco.store.errors import (
    BucketError,
    BucketFull,
    BucketReadOnly,
    BucketUnavailable,
    KeyNotFound,
    TransientError,
    check_key,
    check_prefix,
    explain,
    worth_asking_again,
)
from composer_nb.diloco.store.folder import Entry, FolderStore, MemoryStore, Store
from composer_nb.diloco.store.remote import SAFE, GCSStore, RemoteStore, S3Store, open_remote

__all__ = [
    "SAFE",
    "Bucket",
    "BucketError",
    "BucketFull",
    "BucketReadOnly",
    "BucketUnavailable",
    "DryBucket",
    "Entry",
    "FolderStore",
    "GCSStore",
    "KeyNotFound",
    "MemoryStore",
    "ReadableBucket",
    "RemoteStore",
    "S3Store",
    "Store",
    "TransientError",
    "check_key",
    "check_prefix",
    "explain",
    "open_bucket",
    "open_remote",
    "split_uri",
    "worth_asking_again",
]
