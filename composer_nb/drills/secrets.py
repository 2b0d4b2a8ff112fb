"""Made-up secrets in the shapes of real ones, and the texts that an agent meets them in.

Chapters, spikes and tests practise redaction on them. They are assembled from pieces at run time, from a
seed, so that no file of the repository holds one.
"""

from __future__ import annotations

import base64
import json
import random
import string

WORD, UPPER, HEX = string.ascii_letters + string.digits, string.ascii_uppercase + "234567", "0123456789abcdef"
DIGITS = string.digits


class Maker:
    """Random pieces from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def some(self, count: int, chars: str = WORD) -> str:
        """`count` random characters out of `chars`."""
        return "".join(self.rng.choices(chars, k=count))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _jwt(parts: tuple[bytes, ...]) -> str:
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def _pem(*lines: str) -> str:
    dashes, rsa = "-" * 5, "RSA PRIVATE " + "KEY"
    return "\n".join([f"{dashes}BEGIN {rsa}{dashes}", *lines, f"{dashes}END {rsa}{dashes}"])


def example_secrets(seed: int = 0) -> dict[str, tuple[str, str]]:
    """Kind to (secret, text that holds it), made up from `seed`."""
    made = Maker(seed)
    jwt = _jwt((b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"Ada"}', made.rng.randbytes(32)))
    pem = _pem(*(made.some(64) for _ in range(5)))
    return {
        **_tokens(made),
        "JWT": (jwt, f"Set-Cookie: session={jwt}; Path=/"),
        "PEM": (pem, f"$ cat id_rsa\n{pem}\n$"),
        **_in_place(made),
    }


def _tokens(made: Maker) -> dict[str, tuple[str, str]]:
    """Tokens of vendors, each in a line of a log."""
    return {
        "AWS key id": ((s := "AK" + "IA" + made.some(16, UPPER)), f"key {s} is active"),
        "AWS secret": ((s := made.some(40)), f"aws_secret_access_key = {s}"),
        "GitHub classic": ((s := "gh" + "p_" + made.some(36)), f"remote: {s}"),
        "GitHub fine-grained": (
            (s := "github_" + "pat_" + made.some(22) + "_" + made.some(59)),
            f"echo {s} | gh auth login",
        ),
        "GitHub OAuth": ((s := "gh" + "o_" + made.some(36)), f"oauth_token: {s}"),
        "GitLab": ((s := "gl" + "pat-" + made.some(20)), f"using {s}"),
        "Slack token": (
            (s := "xo" + "xb-" + made.some(12, DIGITS) + "-" + made.some(12, DIGITS) + "-" + made.some(24)),
            f"bot {s}",
        ),
        "Slack webhook": (
            (s := "T" + made.some(8, UPPER) + "/B" + made.some(8, UPPER) + "/" + made.some(24)),
            f"POST https://hooks.slack.com/services/{s}",
        ),
        "Stripe": ((s := "sk_" + "live_" + made.some(24)), f"stripe {s}"),
        "OpenAI, old": ((s := "sk-" + made.some(20) + "T3Blb" + "kFJ" + made.some(20)), f"using {s} now"),
        "OpenAI, project": (
            (s := "sk-" + "proj-" + made.some(74) + "T3Blb" + "kFJ" + made.some(74)),
            f"using {s} now",
        ),
        "Anthropic": ((s := "sk-" + "ant-api03-" + made.some(93) + "AA"), f"using {s} now"),
        "OpenRouter": ((s := "sk-" + "or-v1-" + made.some(64, HEX)), f"using {s} now"),
        "Hugging Face": ((s := "h" + "f_" + made.some(34)), f"login --token {s}"),
        "Google": ((s := "AI" + "za" + made.some(35)), f"https://maps.example.com/js?key={s}"),
        "npm": ((s := "np" + "m_" + made.some(36)), f"//registry.npmjs.org/:_authToken={s}"),
        "PyPI": ((s := "py" + "pi-AgEIcHlwaS5vcmc" + made.some(90)), f"TWINE {s}"),
        "SendGrid": ((s := "S" + "G." + made.some(22) + "." + made.some(43)), f"mail {s}"),
        "Twilio": ((s := "S" + "K" + made.some(32, HEX)), f"sid {s}"),
        "Azure storage": (
            (s := _b64(made.rng.randbytes(64))),
            f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={s};EndpointSuffix=core.windows.net",
        ),
    }


def _in_place(made: Maker) -> dict[str, tuple[str, str]]:
    """Secrets in addresses, headers and settings, and tokens of further vendors."""
    return {
        "basic-auth URL": ((s := made.some(14)), f"https://bob:{s}@example.com/simple"),
        "basic-auth header": ((s := _b64(b"bob:" + made.some(14).encode())), f"Authorization: Basic {s}"),
        "bearer header": ((s := made.some(40)), f"-H 'Authorization: Bearer {s}'"),
        "database URL": (
            (s := made.some(14)),
            f"DATABASE_URL=postgresql+psycopg://app:{s}@db.internal:5432/app",
        ),
        "signed URL": (
            (s := made.some(64, HEX)),
            f"https://b.s3.amazonaws.com/k?X-Amz-Date=2026&X-Amz-Signature={s}",
        ),
        "DigitalOcean": ((s := "do" + "p_v1_" + made.some(64, HEX)), f"using {s} now"),
        "Vault": ((s := "hv" + "s." + made.some(92)), f"using {s} now"),
        "Grafana": ((s := "gl" + "sa_" + made.some(32) + "_" + made.some(8, HEX)), f"using {s} now"),
        "Shopify": ((s := "shp" + "at_" + made.some(32, HEX)), f"using {s} now"),
        "GitHub in base64": ((s := _b64(("gh" + "p_" + made.some(36) + "!").encode())), f"data: {s}"),
        ".env": ((s := made.some(15) + "1"), f"DEBUG=1\nDB_PASSWORD={s}\nPORT=80"),
        "YAML": ((s := made.some(15) + "1"), f"db:\n  password: {s}\n  port: 1"),
        "JSON": ((s := made.some(15) + "1"), json.dumps({"user": "app", "password": s})),
        "shell export": ((s := made.some(23) + "1"), f'export API_TOKEN="{s}"'),
    }


def by_form(seed: int = 0) -> dict[str, str]:
    """Secrets that their own shape gives away."""
    made = Maker(seed)
    jwt = _jwt((b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890"}', made.rng.randbytes(32)))
    return {
        "aws id": "AK" + "IA" + made.some(16, UPPER),
        "github classic": "gh" + "p_" + made.some(36),
        "github fine-grained": "github_" + "pat_" + made.some(22) + "_" + made.some(59),
        "github oauth": "gh" + "o_" + made.some(36),
        "gitlab": "gl" + "pat-" + made.some(20),
        "slack": "xo" + "xb-" + made.some(12, DIGITS) + "-" + made.some(24),
        "slack webhook": "https://hooks.sl"
        + "ack.com/services/T"
        + made.some(8, UPPER)
        + "/B"
        + made.some(8, UPPER)
        + "/"
        + made.some(24),
        "stripe": "sk_" + "live_" + made.some(24),
        "openai old": "sk-" + made.some(20) + "T3Blb" + "kFJ" + made.some(20),
        "openai project": "sk-" + "proj-" + made.some(74) + "T3Blb" + "kFJ" + made.some(74),
        "anthropic": "sk-" + "ant-api03-" + made.some(93) + "AA",
        "openrouter": "sk-" + "or-v1-" + made.some(64, HEX),
        "hugging face": "h" + "f_" + made.some(34),
        "google": "AI" + "za" + made.some(35),
        "npm": "np" + "m_" + made.some(36),
        "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + made.some(90),
        "sendgrid": "S" + "G." + made.some(22) + "." + made.some(43),
        "twilio": "S" + "K" + made.some(32, HEX),
        "jwt": jwt,
        "pem": _pem(made.some(64), made.some(40) + "=="),
    }


def by_place(seed: int = 0) -> dict[str, tuple[str, str]]:
    """Secrets that only their place gives away, each with a line that holds it."""
    made = Maker(seed)
    forms = {
        "aws secret": (made.some(40), "aws_secret_access_key = {}"),
        "azure": (
            _b64(made.rng.randbytes(64)),
            "AccountName=a;Account" + "Key={};EndpointSuffix=core.windows.net",
        ),
        "basic-auth url": (made.some(14), "https://bob:{}@example.com/simple"),
        "encoded url": (made.some(14), "to=https%3A%2F%2Fbob%3A{}%40example.com%2F"),
        "user token url": (made.some(24), "https://{}@git.example.com/a.git"),
        "database url": (made.some(14), "postgresql+psycopg://app:{}@db.internal:5432/app"),
        "basic header": (_b64(b"bob:" + made.some(14).encode()), "Authorization: Basic {}"),
        "bearer header": (made.some(40), "-H 'Authorization: Bearer {}'"),
        "api key header": (made.some(20), '"X-Api-Key": "{}"'),
        "signed url": (made.some(64, HEX), "https://b.example.com/k?X-Amz-Date=1&X-Amz-Signature={}&x=1"),
        "token url": (made.some(20), "https://api.example.com/v1?token={}"),
        ".env": (made.some(9) + "$1&x", "DB_PASSWORD={}"),
        ".env words": ("correct" + "horse", "DB_PASSWORD={}"),
        ".env key": (made.some(20) + "1", "ACME_KEY={}"),
        "yaml": (made.some(9) + "1", "  password: {}"),
        "json": (made.some(9), '{{"db": 1, "password": "{}"}}'),
        "escaped json": (made.some(9) + "1", 'sent "{{\\"token\\": \\"{}\\"}}"'),
        "export": (made.some(9) + "1", 'export API_TOKEN="{}"'),
        "python": (made.some(9) + "1", "client = connect(api_key='{}')"),
        "flag": (made.some(9) + "1", "login --password {} --quiet"),
        "curl": (made.some(9), "curl -s -u bob:{} https://example.com"),
        "cookie": (made.some(20), "Cookie: theme=dark; session={}"),
        "netrc": (made.some(9), "machine example.com login ada password {}"),
        "mysql": (made.some(9), "mysql -h db -u root -p{} app"),
        "sshpass": (made.some(9), "sshpass -p '{}' ssh ada@db"),
        "npmrc": (made.some(8, HEX) + "-" + made.some(12, HEX) + "1", "//registry.npmjs.org/:_authToken={}"),
        "e-mail": ("ada.b+" + made.some(6) + "@mail.example.org", "by {},"),
        "encoded e-mail": ("ada.b" + made.some(6), "user={}%40mail.example.org"),
        "windows home": ("Ad" + "alovelace", r"cd C:\Users\{}\src"),
        "escaped windows home": ("Ad" + "alovelace", r"cd C:\\Users\\{}\\src"),
        "home": ("ad" + "alovelace", "cd /home/{}/src"),
        "mac home": ("ad" + "alovelace", "file:///Users/{}"),
        "home in a flag": ("ad" + "alovelace", "cc -I/home/{}/include"),
        "home in escapes": ("ad" + "alovelace", "a\\n/home/{}/x"),
        "encoded home": ("ad" + "alovelace", "path=%2Fhome%2F{}%2Fx"),
        "project folder": ("ad" + "alovelace", "~/.claude/projects/-home-{}-work"),
    }
    return {kind: (secret, text.format(secret)) for kind, (secret, text) in forms.items()}
