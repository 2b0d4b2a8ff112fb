"""Every planted kind goes, wherever it stands, and what stands around it stays; ordinary files are left
alone; time grows as the text.

Nothing secret stands in this file: the drill makes it from a seed.
"""

import base64
import csv
import io
import json
import random
import re
import sysconfig
import time
import uuid
from hashlib import sha256
from pathlib import Path

import pytest

from composer_nb.drills.planted import planted
from composer_nb.redaction import KINDS, NotCleanError, Redactor, assert_clean, detectors, personal
from composer_nb.traces import Action, ToolCall, TraceState

ROWS = planted()
PLACEHOLDER = r"<(?:SECRET|PERSONAL)_\d+>"
BEFORE, AFTER = "first line\n", "\nlast line"


@pytest.fixture(scope="module", autouse=True)
def scanner():
    """Compile Kingfisher's rules once, outside any time limit."""
    detectors._scanner()


def outcome(row) -> re.Pattern[str]:
    """The text of a row with a placeholder where its secret was."""
    return re.compile(re.escape(BEFORE + row.text + AFTER).replace(re.escape(row.secret), PLACEHOLDER))


def state_with(**changes) -> TraceState:
    fields = {
        "state_id": "s/1",
        "messages": [{"role": "user", "content": "hi"}],
        "student_action": Action("ok"),
    }
    return TraceState(**fields | changes)


def in_text(text: str) -> str:
    return Redactor().text(text)


def in_arguments(text: str) -> str:
    call = ToolCall("write", {"files": [{"body": text}], "n": 1}, "c1")
    state = Redactor().state(state_with(student_action=Action("", (call,))))
    return state.student_action.tool_calls[0].arguments["files"][0]["body"]


def in_results(text: str) -> str:
    message = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": text}]}
    return Redactor().state(state_with(messages=[message])).messages[0]["content"][0]["text"]


def in_json(text: str) -> str:
    document = json.dumps({"out": json.dumps([text]), "n": 1.50}, indent=1)
    return json.loads(json.loads(Redactor().text(document))["out"])[0]


@pytest.mark.parametrize("place", [in_text, in_arguments, in_results, in_json])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_a_planted_kind_goes_and_the_rest_stays(row, place):
    assert outcome(row).fullmatch(place(BEFORE + row.text + AFTER))


@pytest.mark.parametrize("row", planted("token", "personal"), ids=lambda row: row.kind)
def test_a_planted_kind_goes_from_json_in_a_string_that_is_no_document(row):
    """As a log shows it: a broken document, with each quote and line's end escaped."""
    escaped = json.dumps(BEFORE + row.text + AFTER)[:-1]
    redacted = Redactor().text(f"sent {escaped}")
    assert not any(row.secret[i : i + 8] in redacted for i in range(len(row.secret) - 7))
    assert redacted.startswith('sent "first line\\n') and redacted.endswith("\\nlast line")


def test_a_hundred_kinds_are_planted_and_no_kind_twice():
    kinds = [row.kind for row in ROWS]
    assert len(kinds) == len(set(kinds)) >= 100 and {row.family for row in ROWS} == {
        "token",
        "place",
        "broken",
        "personal",
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_too(seed):
    left = [
        row.kind
        for row in planted(seed=seed)
        if not outcome(row).fullmatch(Redactor().text(BEFORE + row.text + AFTER))
    ]
    assert not left


@pytest.mark.parametrize("row", ROWS[::7], ids=lambda row: row.kind)
def test_the_gate_finds_what_redaction_replaces_and_nothing_after_it(row):
    with pytest.raises(NotCleanError) as caught:
        assert_clean(row.text)
    assert row.secret not in str(caught.value)
    redactor = Redactor()
    once = redactor.text(row.text)
    assert redactor.text(once) == once
    assert_clean(once)


def test_the_gate_looks_with_the_settings_it_is_given():
    row = next(row for row in ROWS if row.family == "personal")
    assert_clean(row.text, redactor=Redactor(personal=False))


# --- one thing, one placeholder ---------------------------------------------------------------------


def test_a_number_that_was_told_once_goes_everywhere_and_however_it_is_grouped():
    by_kind = {row.kind: row.secret for row in ROWS}
    fours = by_kind["card, by fours"]
    bare, ssn = fours.replace(" ", ""), by_kind["US SSN, bare"]
    text = f"card {fours}\nrow {bare},{ssn}\nSSN {ssn}\nhash a{bare}"
    assert in_text(text) == (
        f"card <PERSONAL_1>\nrow <PERSONAL_1>,<PERSONAL_2>\nSSN <PERSONAL_2>\nhash a{bare}"
    )


def test_a_token_in_pieces_has_the_placeholder_of_the_whole():
    row = next(row for row in ROWS if row.kind == "token in colours")
    whole = re.sub("\x1b\\[[0-9;]*m", "", row.secret)
    assert in_text(f"{row.secret} is {whole}") == "<SECRET_1> is <SECRET_1>"


def test_the_name_in_a_prompt_goes_everywhere():
    assert in_text("adalove@laptop:~$ id\nadalove") == "<PERSONAL_1>:~$ id\n<USER_1>"


@pytest.mark.parametrize("key", ["phone", "phoneNumber", "tel"])
def test_the_key_of_an_object_tells_what_its_number_is(key):
    assert Redactor().value({key: "030 555 0132"}) == {key: "<PERSONAL_1>"}
    assert Redactor().value({"build": "030 555 0132"}) == {"build": "030 555 0132"}


def test_a_registry_login_is_known_by_its_key():
    login = base64.b64encode(b"ada:horse-7battery").decode()
    value = {"auths": {"ghcr.io": {"auth": login}}, "auth": "basic"}
    assert Redactor().value(value) == {"auths": {"ghcr.io": {"auth": "<SECRET_1>"}}, "auth": "basic"}


# --- numbers, and cells of a table ------------------------------------------------------------------

KEYS = {
    "card": "card_number", "US SSN": "ssn", "German tax id": "steuerId", "French NIR": "nir",
    "Dutch BSN": "bsn", "Brazilian CPF": "cpf", "Indian Aadhaar": "aadhaar",
    "Swedish personnummer": "personnummer", "phone": "mobilePhone",
}  # fmt: skip
DIGITS = [
    (next(key for kind, key in KEYS.items() if row.kind.startswith(kind)), re.sub(r"\D", "", row.secret))
    for row in planted("personal")
    if row.kind.startswith(tuple(KEYS)) and re.sub(r"[\W_]", "", row.secret).isdecimal()
]
TOLD = [(key, digits) for key, digits in DIGITS if not digits.startswith("0")]
FILLER = "Nothing of anybody stands in this line.\n" * 3


def test_most_kinds_are_tried_as_numbers():
    assert {key for key, _ in TOLD} == set(KEYS.values())


@pytest.mark.parametrize(("key", "digits"), TOLD)
def test_a_number_under_a_telling_key_goes_and_json_stays_json(key, digits):
    value = {"rows": [{key: int(digits), "n": 12, "at": 1764012345678}], "of": 4.5}
    clean = {"rows": [{key: "<PERSONAL_1>", "n": 12, "at": 1764012345678}], "of": 4.5}
    assert Redactor().value(value) == clean
    for text in (
        json.dumps(value),
        json.dumps(value, indent=1),
        json.dumps(value).replace(digits, f"{digits}.0"),
    ):
        assert json.loads(Redactor().text(text)) == clean
    lines = f"{json.dumps(value)}\n{json.dumps({'id': int(digits)})}\n"
    assert [json.loads(line) for line in Redactor().text(lines).splitlines()] == [
        clean,
        {"id": "<PERSONAL_1>"},
    ]
    state = Redactor().state(
        state_with(student_action=Action("", (ToolCall("pay", {key: int(digits)}, "c1"),)))
    )
    assert state.student_action.tool_calls[0].arguments == {key: "<PERSONAL_1>"}
    with pytest.raises(NotCleanError, match="left at rows"):
        assert_clean(value)
    assert_clean(clean)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize(("key", "digits"), TOLD)
def test_a_column_with_a_telling_name_goes_and_the_table_stays_one(key, digits, mark, quote):
    rows = [
        ["", key, "note"],
        *[[str(i), str(1000 + i), f'"a{mark} b"'] for i in range(40)],
        ["40", digits, digits],
    ]
    cells = [rows[0]] + [[i, f"{quote}{told}{quote}", note] for i, told, note in rows[1:]]
    text = "".join(mark.join(row) + "\r\n" for row in cells)
    found = list(csv.reader(io.StringIO(in_text(text), newline=""), delimiter=mark))
    assert found == [[c.strip('"') for c in row] for row in rows[:-1]] + [
        ["40", "<PERSONAL_1>", "<PERSONAL_1>"]
    ]
    assert in_text(FILLER + text.replace("\r\n", "\n") + "\n" + FILLER).count("<PERSONAL_1>") == 2


def test_zeros_that_a_number_lost_are_put_back():
    bsn = next(n for n in range(10_000_000, 99_999_999) if personal.is_dutch(f"{n:09d}"))
    cpf = next(n for n in range(1_000_000_000, 9_999_999_999) if personal.is_brazilian(f"{n:011d}"))
    assert Redactor().value({"bsn": bsn, "cpf": cpf, "n": bsn + 1}) == {
        "bsn": "<PERSONAL_1>",
        "cpf": "<PERSONAL_2>",
        "n": bsn + 1,
    }


def test_counts_of_telephones_are_no_numbers_of_them():
    visits = {"desktop": 12_000_000, "mobile": 34_000_000, "phones": 1_234_567_890}
    assert Redactor().value(visits) == visits


@pytest.mark.parametrize("digits", ["00000000000", "0" * 16, "11111111111"])
def test_equal_digits_are_read(digits):
    assert in_text(f"tax id {digits}, card {digits}") == f"tax id {digits}, card {digits}"


def test_what_is_left_out_stays_a_number():
    value = {"phone": 4930901820, "card": 4111111111111111}
    assert Redactor(personal=False).value(value) == value == Redactor(personal=["IBAN"]).value(value)
    assert Redactor(personal=["phone number"]).value(value) == {**value, "phone": "<PERSONAL_1>"}
    nothing = {
        "a": True,
        "b": None,
        "c": 1e300,
        "d": float("inf"),
        "e": -4111111111111111,
        "card": 4111111111111111.5,
    }
    assert Redactor().value(nothing) == nothing


ORDINARY_KEYS = (
    "id user_id account_id build timestamp created_at mtime size bytes count total offset seed hash port pid "
    "price amount duration_ns tokens rows cardinality discarded panel desktop tel_aviv telemetry phone_id "
    "session pin_code index order_number issue invoice tracking_number isbn ean lat lon width checksum "
    "revision epoch uid gid inode"
).split()


def test_ordinary_numbers_stay_numbers():
    """Of random numbers of seven to nineteen digits under forty-six names, almost none is taken
    for a person's.
    """
    rng, tried, touched = random.Random(0), 0, 0
    for _ in range(400):
        row = {key: rng.randrange(10 ** (n := rng.randrange(6, 19)), 10 ** (n + 1)) for key in ORDINARY_KEYS}
        for clean in (Redactor().value(row), json.loads(Redactor().text(json.dumps(row)))):
            tried, touched = tried + len(row), touched + sum(clean[key] != row[key] for key in row)
    assert tried > 36_000 and touched / tried < 0.001, touched


ODD_ROWS = {
    "doubled quotes": '"Bo ""B"" C",01711234568', "blank line": "", "line break": '"a\nb",01711234568',
    "a comma too many": "B,C,017", "a long field": "x" * 600 + ",01711234568",
    "another mark": "Bo;x,01711234568", "three of them": "\n\nB,C,017", "an open quote": '"Bo,017',
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_ROWS.values(), ids=ODD_ROWS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_odd_row_does_not_end_a_table(odd, end):
    text = end.join(["name,phone", "Ann,01711234567", odd, "Di,01711234569", ""])
    found = Redactor(personal=True).text(text)
    assert "0171123456" not in found and found.count("<PERSONAL_") == 2 + ("01711234568" in odd)
    assert found.count("\n") == text.count("\n")


def test_a_table_with_open_quotes_takes_time_like_its_length():
    def seconds(rows: int) -> float:
        text = "name,phone\n" + '"a,1\n' * rows
        since = time.perf_counter()
        Redactor(personal=True).text(text)
        return time.perf_counter() - since

    seconds(500)
    assert seconds(16_000) < 40 * max(seconds(2_000), 0.01), (
        "eight times the length, five times as much allowed"
    )


def test_ordinary_columns_stay_as_they_are():
    rng, lines = random.Random(1), [",".join(ORDINARY_KEYS)]
    lines += [
        ",".join(str(rng.randrange(10 ** (n := rng.randrange(6, 19)), 10 ** (n + 1))) for _ in ORDINARY_KEYS)
        for _ in range(800)
    ]
    table = "\n".join(lines)
    found = [row.split(",") for row in in_text(table).splitlines()]
    changed = sum(
        a != b
        for new, old in zip(found, lines, strict=True)
        for a, b in zip(new, old.split(","), strict=True)
    )
    assert changed / (800 * len(ORDINARY_KEYS)) < 0.001, changed


def test_the_numbers_of_this_repository_stay():
    paths = sorted(Path(__file__).resolve().parents[1].glob("spikes/*/runs/*/metrics.json"))
    assert len(paths) > 20
    for path in paths:
        value = json.loads(path.read_text(encoding="utf-8"))
        assert Redactor(emails=False, homes=False).value(value) == value, path


# --- switches ---------------------------------------------------------------------------------------


def test_the_family_and_each_kind_can_be_left_out():
    rows = [row for row in ROWS if row.family == "personal"]
    alone = {
        kind: sum(bool(Redactor(personal=[kind]).text(row.text) != row.text) for row in rows)
        for kind in KINDS
    }
    assert min(alone.values()) >= 1 and sum(alone.values()) == len(rows)
    for row in rows:
        assert Redactor(personal=False).text(row.text) == row.text == Redactor(personal=[]).text(row.text)


@pytest.mark.parametrize("wrong", [["passport"], "IBAN", ["IBAN", "iban"]])
def test_an_unknown_kind_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match="payment card"):
        Redactor(personal=wrong)


# --- what stays -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "id 4111111111111111 done",
        "order 219099999, 123456782 rows, 12345678Z",
        "2026-11-23 10:15:00 123456 7890123 took 1234567890 ns",
        "ssn = None; card = deck[0]; pan_x = 10",
        "+ 1234567890\n+12345678901\n-12345678901\n",
        "x = 1 +1234567890",
        "the phone rang 5 times in 2026",
        "iphone 1234567",
        "tel. 2026-11-23",
        "git@github.com: Permission denied (publickey).",
        "root@3f2a91bc:/# ls",
        "ubuntu@ip-10-0-0-1:~$ ls",
        "ssh git@gitlab.example",
        "npm i left-pad@next # ssh",
        "C = A @ B # $",
        "<label>Password</label><input type='password' placeholder='Password'>",
        "<password>${db.password}</password>",
        '<string name="password">Enter your password</string>',
        "<key>CFBundleName1</key>",
        "the password is required; the token is invalid",
        "a token is 32-byte or 64bit, the secret is base64-encoded, the password is sha256-hashed",
        "password is at least 8 characters",
        "IDENTIFIED BY '<password>'",
        "getpass('password', 'user')",
        'parser.add_argument("--password", "-p")',
        "user, password = login()\na, b = c",
        "name: token\nvalue: token",
        "auth: basic",
        '"auth": "aGVsbG8gd29ybGQhIQ=="',
        "vcp_short",
        "fw_update_the_firmware_image",
        "secret_manager_client",
        "a_line_that_ends\nand_another_that_begins",
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709\nda39a3ee5e6b4b0d3255bfef95601890afd80709",
    ],
)
def test_ordinary_text_stays(text):
    assert Redactor().text(text) == text


def ordinary(size: int) -> list[str]:
    """About `size` characters of sources, package records, lock files, ids and images."""
    rng, folder = random.Random(0), Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    texts = [
        "\n".join(
            f"{uuid.UUID(int=rng.getrandbits(128))} {rng.getrandbits(160):040x}" for _ in range(size // 800)
        ),
        "\n".join(
            f'"integrity": "sha512-{base64.b64encode(rng.randbytes(64)).decode()}"'
            for _ in range(size // 1200)
        ),
        "\n".join(
            f"p==1.{i} --hash=sha256:{sha256(rng.randbytes(8)).hexdigest()}" for i in range(size // 900)
        ),
        base64.encodebytes(rng.randbytes(size // 14)).decode(),
        base64.b64encode(rng.randbytes(size // 14)).decode(),
    ]
    paths = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    paths += [*sorted(packages.glob("*/RECORD")), *sorted(packages.glob("*/METADATA"))]
    rng.shuffle(paths)
    held = sum(map(len, texts))
    for path in paths:
        if held > size:
            break
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        held += len(texts[-1])
    return texts


def touched(redactor: Redactor, texts: list[str]) -> float:
    """The share of characters that the detectors would replace."""
    counts = [
        len({at for d in redactor.detectors for span in d(text) for at in range(span.start, span.end)})
        for text in texts
    ]
    return sum(counts) / sum(map(len, texts))


@pytest.mark.parametrize("personal", [True, False])
def test_ordinary_files_are_left_alone(personal):
    texts = ordinary(2_000_000)
    redactor = Redactor(personal=personal, emails=False, homes=False)
    assert sum(map(len, texts)) >= 2_000_000 and touched(redactor, texts) < 0.002


# --- time -------------------------------------------------------------------------------------------

RUNS = [
    "1",
    "1 ",
    "12 34 ",
    "4111 1111 ",
    "+1",
    "card 1",
    "phone: ",
    "A1",
    "DE89 ",
    "a@b",
    "a@b:~",
    "ssh a@",
    "Z9",
    "aB3/",
    "aB3",
    "=",
    '"',
    "'",
    "`",
    '\\"',
    " ",
    "\t",
    "\n",
    "<a ",
    "<password>",
    "<input value=",
    "password '",
    "identified with ",
    "set password ",
    "define('",
    "name: a\nvalue: ",
    "key,",
    "a,password\n",
    "password,a\nb,c\n",
    "card,a\n1,2\n",
    "a,phone\n",
    '{"tel": 1234567}\n',
    "1234567,",
    "the password for ",
    "token is ",
    "auth=",
    "MIIEpAIBAAK",
    "Private-Lines: 3\n",
    "-" * 5 + "END RSA PRIVATE " + "KEY",
    "abcdefgh1\n",
    "abcdefgh1\\n",
    "\x1b[31m",
    "\x1b[",
    "\\u001b[",
    "A3-",
    "AAAAAAAA",
    "Q~",
    "1/1",
    "sk_",
]


def seconds(text: str) -> float:
    redactor, start = Redactor(), time.process_time()
    redactor.text(text)
    return time.process_time() - start


@pytest.mark.parametrize("piece", RUNS)
def test_time_grows_as_the_text(piece):
    size = 20_000
    short, long = piece * (size // len(piece)), piece * (4 * size // len(piece))
    seconds(short)
    assert min(seconds(long) for _ in range(2)) < 8 * min(seconds(short) for _ in range(2)) + 0.1
