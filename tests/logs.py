"""What the tests of log formats share: reading records from a file, and what a context must be."""

import json
import random


def read(tmp_path, records, kind, name="log.jsonl", **options):
    """The states of records written to one file, and the report."""
    path = tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    else:
        path.write_text(json.dumps(records))
    reader = kind(**options)
    return list(reader.ingest(path)), reader.report


def is_whole(messages):
    """Whether each call of a context has exactly one result, right behind its turn, and no other
    result is there.
    """
    messages, at = list(messages), 0
    while at < len(messages):
        wanted = sorted(c["id"] for c in messages[at].get("tool_calls") or ())
        got = messages[at + 1 : at + 1 + len(wanted)]
        if messages[at]["role"] == "tool" or sorted(m.get("tool_call_id", "") for m in got) != wanted:
            return False
        at += 1 + len(wanted)
    return True


def essence(state):
    """What twins in two formats have in common."""
    return list(state.messages), state.student_action, state.failures, state.model


def damaged(records, seed, most=14):
    """Records drawn in any order, one of them hurt, as lines."""
    draw = random.Random(seed)
    lines = [json.dumps(draw.choice(records)) for _ in range(draw.randint(1, most))]
    hurt = draw.randrange(len(lines))
    lines[hurt] = lines[hurt].replace(
        draw.choice(list('"{}[]:ae1')), draw.choice(["", "null", "7", "\x00"]), 1
    )
    return "\n".join(lines)


def mutilated(value, draw):
    """The value with one thing in it replaced by something of another type."""
    spoiled = [None, 7, "x", [], {}, [3], {"type": 5}, True]
    if draw.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(spoiled)
    at = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    found = dict(value) if isinstance(value, dict) else list(value)
    found[at] = mutilated(found[at], draw)
    return found
