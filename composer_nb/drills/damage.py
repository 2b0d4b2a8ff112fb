"""Payloads with planted damage, and the count of what a reader takes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_nb.diloco.payload import (
    DamagedPayload,
    PayloadRef,
    pack,
    payload_metadata,
    read_payload,
    spec_of,
    write_payload,
)
from composer_nb.diloco.store import Bucket

if TYPE_CHECKING:
    from torch import Tensor

RESEALABLE = (
    "truncation", "oversized", "nan", "wrong_shape", "wrong_dtype", "missing_key", "extra_key",
    "not_safetensors", "header_bomb",
)  # fmt: skip
DAMAGE = ("bit_flip", "stale", "wrong_hash", *RESEALABLE)


def damage(data: bytes, kind: str, seed: int) -> bytes:
    """Payload bytes with one kind of damage (see `DAMAGE`), placed by `seed`. Raises ValueError for an
    unknown kind."""
    if kind not in DAMAGE:
        raise ValueError(f"unknown damage {kind!r}; known: {', '.join(DAMAGE)}")
    rng = random.Random(f"{kind}{seed}")
    if kind == "bit_flip":
        at, flipped = rng.randrange(8 * len(data)), bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        return bytes(flipped)
    if kind == "truncation":
        return data[: rng.randrange(len(data))]
    if kind == "oversized":
        return data + rng.randbytes(rng.randint(1, 4096))
    if kind == "not_safetensors":
        return rng.randbytes(len(data))
    if kind == "wrong_hash":  # the same tensors, their header in another order
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(dict(reversed(json.loads(data[8:end]).items())), separators=(",", ":"))
        return data[:8] + header.encode().ljust(end - 8) + data[end:]
    if kind == "header_bomb":
        return rng.choice((2**63 - 1, 2**40, 10**8, len(data) - 7)).to_bytes(8, "little") + data[8:]
    return _rebuilt(data, kind, rng)


def _rebuilt(data: bytes, kind: str, rng: random.Random) -> bytes:
    """A well-formed payload with the wrong tensors in it."""
    import torch
    from safetensors.torch import load

    tensors, metadata = load(data), payload_metadata(data)
    name = rng.choice(sorted(n for n, t in tensors.items() if t.is_floating_point() and t.numel()))
    chosen = tensors[name]
    if kind == "nan":
        chosen.view(-1)[rng.randrange(chosen.numel())] = rng.choice(
            (float("nan"), float("inf"), -float("inf"))
        )
    elif kind == "wrong_shape":
        tensors[name] = chosen.reshape(rng.choice(((1, *chosen.shape), (*chosen.shape, 1), (-1, 1, 1))))
    elif kind == "wrong_dtype":
        tensors[name] = chosen.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[chosen.itemsize])
    elif kind == "missing_key":
        del tensors[name]
    elif kind == "extra_key":
        tensors[f"{name}.extra"] = chosen.clone()
    elif kind == "stale":
        tensors[name] = chosen + 1
    return pack(tensors, metadata)


def damage_drill(
    bucket: Bucket, tensors: Mapping[str, Tensor], tries: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Damage a payload `tries` times in turn by every kind and way, and read it. One row per try: kind, way,
    reason, taken.

    `replaced`: the damaged bytes lie under the name of the sound ones. `resealed`: a broken writer hashed its
    broken bytes. `taken` is whether any tensor came back, or the object stayed readable under its name.
    """
    ways = [(kind, "replaced") for kind in DAMAGE] + [(kind, "resealed") for kind in RESEALABLE]
    rows = []
    for i in range(tries):
        kind, way = ways[i % len(ways)]
        ref = write_payload(bucket, tensors)
        bad = damage(bucket.get(ref.key), kind, seed + i)
        if way == "resealed":
            ref = PayloadRef(hashlib.sha256(bad).hexdigest(), len(bad), ref.spec)
        bucket.put(ref.key, bad)
        try:
            read_payload(bucket, ref, expect=spec_of(tensors))
            reason, taken = "", True
        except DamagedPayload as error:
            reason, taken = error.reason, bucket.exists(ref.key) or not bucket.exists(str(error.quarantined))
        rows.append({"kind": kind, "way": way, "reason": reason, "taken": taken})
    return rows
