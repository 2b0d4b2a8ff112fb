"""Secrets and personal data by rule, one row per kind: a shape or a function, and the line that holds it.

A shape is text in which `{w20}` stands for twenty random letters and digits (other letters: see `CHARS`),
`§` for the secret in its line, and the `SIGNS` for what cannot be seen.
They are made from a seed at run time, so that no file of the repository holds one. A new kind is a row.
"""

from __future__ import annotations

import base64
import re
import string
from collections.abc import Callable
from typing import NamedTuple

from composer_nb.drills.secrets import HEX, WORD, Maker

CHARS = {
    "w": WORD,
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "a": string.ascii_lowercase,
    "x": HEX,
    "X": HEX.upper(),
    "d": string.digits,
    "n": WORD + "_-",
    "b": WORD + "+/",
    "B": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    "g": "{x8}-{x4}-{x4}-{x4}-{x12}",
}


SIGNS = str.maketrans({"¶": "\n", "⇥": "\t", "␛": "\x1b", "␠": "\u200b", "~": " "})


class Planted(NamedTuple):
    "A `secret` of one `kind` in a `text`."

    kind: str
    family: str
    secret: str
    text: str


def shaped(shape: str, made: Maker) -> str:
    """The shape with random characters in place of its braces."""
    shape = shape.replace("{g}", CHARS["g"])
    return re.sub(r"\{(\w)(\d+)\}", lambda hit: made.some(int(hit[2]), CHARS[hit[1]]), shape)


TOKENS = """
1Password key | A3-{u6}-{u6}-{u5}-{u5}-{u5}-{u5}
1Password service account | ops_eyJ{b300}
Adobe | p8e-{w32}
age | AGE-SECRET-KEY-1{B58}
Airtable | pat{w14}.{x64}
Alibaba | LTAI{w20}
Anthropic admin | sk-ant-admin01-{n93}AA
Artifactory key | AKCp{w69}
Artifactory token | cmVmd{w59}
Asana | 1/{d16}:{x32}
Asana, new | 2/{d16}/{d16}:{x32}
Atlassian | ATATT3xFfGF0{n180}={X8}
Bitbucket app password | ATBB{w24}{X8}
AWS session | IQoJb3JpZ2luX2Vj{b300}
Bedrock | ABSK{b120}
Bedrock, short | bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29t{b200}
Azure AD | {w3}8Q~{w34}
Azure DevOps | {w76}AZDO{w4}
Buildkite | bkua_{x40}
CircleCI | CCIPAT_{w22}_{x40}
ClickHouse | 4b1d{w38}
Clojars | CLOJARS_{x60}
Cloudflare origin | v1.0-{x24}-{x146}
Confluent | cflt{b60}
Contentful | CFPAT-{n43}
crates.io | cio{w32}
Databricks | dapi{x32}
Defined Networking | dnkey-{u26}-{u52}
DigitalOcean | dop_v1_{x64}
Docker Hub | dckr_pat_{n27}
Docker registry in base64 | eyJhdXRocyI6{b80}
Doppler | dp.pt.{w43}
Doppler service | dp.st.dev.{w43}
Dropbox | sl.{n135}
Duffel | duffel_live_{n43}
Dynatrace | dt0c01.{u24}.{u64}
Dynatrace platform | dt0s16.{u8}.{u64}
EasyPost | EZAK{w54}
ElevenLabs | sk_{x48}
Figma | figd_{n40}
Fireworks | fw_{w22}
Fly | fo1_{n43}
Fly, long | fm2_{b120}
GitHub app | ghs_{w36}
GitLab routable | glpat-{n27}.01.{l9}
GoCardless | live_{w40}
Google refresh | 1//0{w60}
Grafana cloud | glc_eyJ{b100}
Groq | gsk_{w52}
Harness | pat.{n22}.{x24}.{w20}
Heroku | HRKU-AA{n58}
HubSpot | pat-na1-{g}
Infisical | st.{g}.{x32}.{x32}
Infracost | ico-{w32}
Langfuse | sk-lf-{g}
LangSmith | lsv2_pt_{x32}_{x10}
LaunchDarkly | sdk-{g}
Linear | lin_api_{w40}
Linear OAuth | lin_oauth_{w64}
Lob | live_{x35}
Mailchimp | {x32}-us12
Mailgun | key-{x32}
Mapbox | sk.eyJ1{w60}.{n22}
Netlify | nfp_{w36}
New Relic user | NRAK-{u27}
New Relic license | {x36}FFFFNRAL
New Relic insert | NRII-{n32}
Notion | ntn_{d11}{w35}
Notion, old | secret_{w43}
npm | npm_{w36}
NuGet | oy2{l43}
NVIDIA | nvapi-{n64}
Octopus | API-{u26}
Okta | SSWS 00{n40}
OpenAI session | sess-{w40}
OpenShift | sha256~{n43}
Open VSX | ovsxat_{n36}
Packagist | packagist_uut_{x64}
Perplexity | pplx-{w48}
Pinecone | pcsk_{w6}_{w63}
PlanetScale | pscale_tkn_{n43}
PlanetScale password | pscale_pw_{n43}
PostHog | phx_{w43}
Postman | PMAK-{x24}-{x34}
Prefect | pnu_{w36}
Pulumi | pul-{x40}
Replicate | r8_{w37}
Resend | re_{w8}_{w24}
RubyGems | rubygems_{x48}
Seam | seam_{w4}_{w30}
Sendinblue | xkeysib-{x64}-{w16}
Sentry organisation | sntrys_eyJpYXQiO{b120}_{b43}
Sentry user | sntryu_{x64}
Shippo | shippo_live_{x40}
Shopify | shpca_{x32}
Slack rotation | xoxe.xoxp-1-{u163}
Sonar | squ_{x40}
Sourcegraph | sgp_{x16}_{x40}
Square | sq0csp-{n43}
Stripe webhook | whsec_{w32}
Supabase | sb_secret_{n31}
Tailscale | tskey-auth-{w12}CNTRL-{w32}
Tavily | tvly-dev-{w32}
Teams webhook | https://acme.webhook.office.com/webhookb2/{g}@{g}/IncomingWebhook/{x32}/{g}
Telegram | {d10}:AA{n33}
Terraform cloud | {w14}.atlasv1.{n64}
Trello | ATTA{x64}{x8}
Twitter bearer | AAAAAAAAAAAAAAAAAAAAAA{w90}
Typeform | tfp_{n44}_{n14}
Vault recovery | hvr.{n24}
Vercel | vcp_{w24}
Vercel blob | vercel_blob_rw_{w16}_{w30}
Weights & Biases | wandb_v1_{w80}
xAI | xai-{w80}
Yandex | AQVN{n38}
Yandex IAM | t1.9{n50}.{n86}
Zapier webhook | hooks.zapier.com/hooks/catch/{d7}/{l7}/
Zuplo | zpka_{w32}_{x8}
"""

PLACES = r"""
XML element | {w9}1 | <db><user>app</user><password>§</password></db>
XML element with attributes | {w9}1 | <s:Password type="text">§</s:Password>
XML settings | {w9}1 | <entry name="connection.password" value="§" />
XML settings, value first | {w9}1 | <add value="§" key="DbPassword"/>
XML property | {w9}1 | <property name="hibernate.connection.password">§</property>
HTML input | {a10} | <input type="password" name="p" value="§">
HTML input, value first | {a10} | <input value='§' type='password'>
HTML input without quotes | {a10}7 | <input type=password value=§>
SQL identified by | {a10} | CREATE USER 'app'@'%' IDENTIFIED BY '§';
SQL identified with | {a10} | ALTER USER app IDENTIFIED WITH caching_sha2_password BY '§';
SQL alter role | {a10} | ALTER ROLE app WITH LOGIN PASSWORD '§';
SQL set password | {a10} | SET PASSWORD FOR 'app' = PASSWORD('§');
PHP define | {a10}7 | define('DB_PASSWORD', '§');
PHP variable | {a10} | $password = '§';
putenv | {w12}7 | os.putenv("API_KEY", "§")
setProperty | {w12}7 | props.setProperty("javax.net.ssl.keyStorePassword", "§");
CSV | {w8}! | name,password,role¶ada,§,admin¶
CSV with semicolons | {a8} | id;user;user_password¶7;ada;"§"¶
TSV | {a8} | login⇥passwd¶ada⇥§¶
prose | {a5}-{d3} | The password is §, do not share it.
prose, quoted | {a8} | The password for the staging box is "§".
prose, was changed | {a5}{d3}! | password was changed to § today
prose, pw | {a6}{d2} | user ada, pw: §
prose, German | {a6}{d2} | Das Passwort lautet §
Rails secret | {x128} | SECRET_KEY_BASE=§
docker login | {w9}1 | docker login -u app -p § registry.example.org
redis command | {w9}1 | redis-cli -h cache -a § ping
redis setting | {w9}1 | port 6379¶requirepass §¶
passphrase of gpg | {w9}1 | gpg --batch --passphrase § -d a.gpg
key in base64 | LS0tLS1CRUdJTiBSU0Eg{b60} | tls.key: §
YAML name and value | {w9}1 | - name: DB_PASSWORD¶  value: §¶
docker auth | login | {"auths": {"https://index.docker.io/v1/": {"auth": "§"}}}
docker auth, indented | login | "ghcr.io": {¶⇥"auth": "§"¶}
identity token | {w40} | "identitytoken": "§"
npm auth | login | //npm.example.org/:_auth=§
headless RSA key | MIIEpAIBAAKCAQEA{b48}¶{b64}¶{b64}¶{b30}== | key:¶§¶
headless PKCS8 key | MIIEvQIBADANBgkqhkiG9w0BAQEFAASC{b32}¶{b64}¶{b20}= | key:¶§¶
headless OpenSSH key | b3BlbnNzaC1rZXktdjEA{b50}¶{b70}¶{b24} | key:¶§¶
tail of a key | {b64}¶{b64}¶{b22}== | ...¶§¶-----END RSA PRIVATE~KEY-----
PuTTY key | {b64}¶{b64}¶{b40} | Private-Lines: 3¶§¶Private-MAC: none
"""

BROKEN = r"""
token over two lines | ghp_{w20}¶{w16} | the token¶§¶is new
token over two lines of a terminal | sk-ant-api03-{w60}¶{w33}AA | echo $KEY gives¶§¶as said
token over three lines | github_pat_{w11}¶{w11}_{w20}¶{w39} | so:¶§¶
token with an escaped break | ghp_{w20}\n{w16} | said "§"
token after a backslash | npm_{w20}\¶{w16} | npm set § now
token in colours | ghp_{w9}␛[1;31m{w9}␛[0m{w18} | match: § here
token in escaped colours | glpat-{w9}\u001b[31m{w11} | match: § here
token with a zero-width space | npm_{w20}␠{w16} | copy § here
password in colours | {w6}␛[32m{w6}7 | ␛[31mpassword␛[0m=§␛[0m end
"""


def _luhn(body: str) -> str:
    """Digits with the one that Luhn asks for behind them."""
    total = sum(sum(divmod(int(d) * (2 - i % 2), 10)) for i, d in enumerate(reversed(body)))
    return body + str(-total % 10)


def _card(made: Maker, prefix: str = "4", length: int = 16) -> str:
    return _luhn(prefix + made.some(length - 1 - len(prefix), string.digits))


def _spaced(number: str, *sizes: int, by: str = " ") -> str:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return by.join(number[start : start + size] for start, size in zip(starts, sizes))


def _iban(made: Maker, country: str = "DE", bban: str = "{d18}") -> str:
    body = shaped(bban, made)
    rest = int("".join(str(int(c, 36)) for c in body + country + "00")) % 97
    return f"{country}{98 - rest:02}{body}"


def _tried(make: Callable[[], str], right: Callable[[list[int]], bool]) -> str:
    """The first number made whose digits are right."""
    return next(number for number in iter(make, None) if right([int(c) for c in number if c.isdigit()]))


def _ssn(made: Maker) -> str:
    return f"{made.rng.randrange(100, 600)}-{made.rng.randrange(10, 99)}-{made.rng.randrange(1000, 9999)}"


def _german(made: Maker) -> str:
    first = list("123456789")
    made.rng.shuffle(first)
    body = "".join([*first, first[0]])
    product = 10
    for digit in body:
        product = (((int(digit) + product) % 10) or 10) * 2 % 11
    return body + str((11 - product) % 10)


def _french(made: Maker) -> str:
    body = (
        f"{made.rng.choice('12')}{made.rng.randrange(40, 99)}{made.rng.randrange(1, 13):02}"
        f"75{made.some(6, '123456789')}"
    )
    return f"{body}{97 - int(body) % 97:02}"


def _spanish(made: Maker, first: str = "") -> str:
    body = made.some(8 - len(first), string.digits)
    number = int(str("XYZ".find(first)) * bool(first) + body)
    return first + body + "TRWAGMYFPDXBNJZSQVHLCKE"[number % 23]


def _dutch(made: Maker) -> str:
    def right(digits: list[int]) -> bool:
        return (sum((9 - i) * d for i, d in enumerate(digits[:8])) - digits[8]) % 11 == 0

    return _tried(lambda: made.some(9, "123456789"), right)


def _brazilian(made: Maker) -> str:
    digits = [int(d) for d in made.some(9, string.digits)]
    for _ in range(2):
        total = sum(d * w for d, w in zip(reversed(digits), range(2, 12)))
        digits.append((11 - total % 11) % 11 % 10)
    return "".join(map(str, digits))


INVERSE = (0, 4, 3, 2, 1, 5, 6, 7, 8, 9)
_ROW = [[(i + j) % 5 for j in range(5)] + [5 + (i + j) % 5 for j in range(5)] for i in range(5)]
_ROW += [[5 + (i - j) % 5 for j in range(5)] + [(i - j) % 5 for j in range(5)] for i in range(5)]


def _aadhaar(made: Maker) -> str:
    body, total = made.some(1, "23456789") + made.some(10, string.digits), 0
    for place, digit in enumerate(map(int, reversed(body)), 1):
        for _ in range(place % 8):
            digit = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)[digit]
        total = _ROW[total][digit]
    return body + str(INVERSE[total])


def _swedish(made: Maker) -> str:
    born = f"{made.rng.randrange(100):02}{made.rng.randrange(1, 13):02}{made.rng.randrange(1, 29):02}"
    return _luhn(born + made.some(3, string.digits))


PERSONAL: dict[str, tuple[Callable[[Maker], str], str]] = {
    "card, bare": (_card, "card number: @"),
    "card, by fours": (lambda m: _spaced(_card(m), 4, 4, 4, 4), "paid with @ today"),
    "card, dashes": (lambda m: _spaced(_card(m, "5500"), 4, 4, 4, 4, by="-"), "paid with @ today"),
    "card, Amex": (lambda m: _spaced(_card(m, "37", 15), 4, 6, 5), "charged to @."),
    "card, Mastercard 2": (lambda m: _card(m, "2221"), "mastercard=@"),
    "IBAN, DE": (_iban, "to @ please"),
    "IBAN, DE, by fours": (lambda m: _spaced(_iban(m), 4, 4, 4, 4, 4, 2), "to @ PAID"),
    "IBAN, GB": (lambda m: _iban(m, "GB", "WEST{d14}"), "account @;"),
    "IBAN, FR": (lambda m: _iban(m, "FR", "{d10}{u11}{d2}"), "compte @"),
    "IBAN, NO": (lambda m: _iban(m, "NO", "{d11}"), '"iban": "@"'),
    "US SSN": (_ssn, "SSN: @"),
    "US SSN, bare": (lambda m: _ssn(m).replace("-", ""), "social security number @"),
    "UK NINO": (lambda m: shaped("AB {d2} {d2} {d2} C", m), "National Insurance number @"),
    "German tax id": (_german, "Steuer-ID: @"),
    "German tax id, spaced": (lambda m: _spaced(_german(m), 2, 3, 3, 3), "IdNr. @"),
    "French NIR": (_french, "numéro de sécu @"),
    "French NIR, spaced": (lambda m: _spaced(_french(m), 1, 2, 2, 2, 3, 3, 2), "de @ est"),
    "Spanish DNI": (_spanish, "DNI @"),
    "Spanish NIE": (lambda m: _spanish(m, "X"), "NIE: @"),
    "Dutch BSN": (_dutch, "BSN @"),
    "Brazilian CPF": (lambda m: _spaced(_spaced(_brazilian(m), 9, 2, by="-"), 3, 3, 6, by="."), "cliente @."),
    "Brazilian CPF, bare": (_brazilian, "cpf=@"),
    "Indian Aadhaar": (lambda m: _spaced(_aadhaar(m), 4, 4, 4), "Aadhaar no. @"),
    "Swedish personnummer": (lambda m: _spaced(_swedish(m), 6, 4, by="-"), "personnummer @"),
    "phone, US": (lambda m: shaped("+1 415 555 01{d2}", m), "call @ now"),
    "phone, UK": (lambda m: shaped("+44 20 7946 0{d3}", m), "call @ now"),
    "phone, FR": (lambda m: shaped("+33 6 12 34 5{d1} {d2}", m), "call @ now"),
    "phone, bare": (lambda m: shaped("+4916{d9}", m), '"to": "@"'),
    "phone, national": (lambda m: shaped("(415) 555-01{d2}", m), "phone: @"),
    "phone, German": (lambda m: shaped("030 555{d4}", m), "Tel. @"),
    "prompt": (lambda m: shaped("{a6}x@{a5}-mbp", m), "@:~/src$ ls"),
    "prompt in brackets": (lambda m: shaped("{a6}x@{a5}7", m), "[@ src]$ ls"),
    "ssh": (lambda m: shaped("{a6}x@{a5}7", m), "ssh -p 2222 @ uptime"),
    "scp": (lambda m: shaped("{a6}x@{a5}7", m), "scp a.txt @:/tmp"),
    "UK NINO, bare": (lambda m: shaped("AB{d2}{d2}{d2}C", m), "National Insurance number @"),
}


def _fill(shape: str, made: Maker) -> str:
    """A shape or text of the tables, with the signs in it that stand for what cannot be seen."""
    if shape == "login":
        return base64.b64encode(f"ada:{made.some(14)}".encode()).decode()
    return shaped(shape.translate(SIGNS), made)


def planted(*families: str, seed: int = 0) -> list[Planted]:
    """A row for each kind of the `families` (token, place, broken, personal; by default all), from `seed`."""
    made, rows = Maker(seed), []
    for line in TOKENS.strip().split("\n"):
        kind, shape = line.split(" | ")
        rows.append(Planted(kind, "token", secret := shaped(shape, made), f"using {secret} now"))
    for family, table in (("place", PLACES), ("broken", BROKEN)):
        for line in table.strip().split("\n"):
            kind, shape, text = line.split(" | ")
            secret = _fill(shape, made)
            rows.append(Planted(kind, family, secret, text.translate(SIGNS).replace("§", secret)))
    for kind, (make, text) in PERSONAL.items():
        rows.append(Planted(kind, "personal", secret := make(made), text.replace("@", secret)))
    return [row for row in rows if not families or row.family in families]
