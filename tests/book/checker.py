"""Opens a built page in a browser and lists what is wrong with it."""

from __future__ import annotations

import io
import re
import shutil
from base64 import b64decode
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import unquote, urlsplit

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]

READY = """
const images = [...document.images];
images.forEach(image => image.loading = "eager");
const maths = document.querySelectorAll(".math").length && window.MathJax && MathJax.startup;
return document.readyState === "complete" && images.every(image => image.complete)
    && (!maths || document.querySelectorAll("mjx-container").length > 0);
"""

INSPECT = """
const article = document.querySelector("article") || document.body;
const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT), prose = [];
while (walker.nextNode())
  if (!walker.currentNode.parentElement.closest("code, pre, script, style, textarea, mjx-container"))
    prose.push(walker.currentNode.textContent);
const maths = [...article.querySelectorAll(".math")];
return {
  prose: prose,
  code: [...article.querySelectorAll("pre, code")].map(node => node.textContent),
  links: [...document.querySelectorAll("a[href]")].map(link => link.href),
  images: [...document.images].map(image => ({
    src: image.src, width: image.naturalWidth, inArticle: article.contains(image), alt: image.alt.trim()})),
  drawings: [...article.querySelectorAll("svg[role=img]:not([aria-hidden=true])")]
    .filter(node => !node.closest("mjx-container"))
    .map(node => [node.getAttribute("aria-label"), node.querySelector("title")?.textContent].join("").trim()),
  formulas: maths.length,
  unrendered: maths.filter(node => !node.querySelector("mjx-container"))
    .map(node => node.textContent.slice(0, 80)),
  containers: document.querySelectorAll("mjx-container").length,
  errors: [...document.querySelectorAll("[data-mjx-error], mjx-merror, [data-mml-node=merror]")]
    .map(node => node.getAttribute("data-mjx-error") || node.textContent.slice(0, 80)),
  network: [...document.querySelectorAll("script[src], link[href], img[src], iframe[src]")]
    .filter(node => !["canonical", "alternate"].includes(node.rel)).map(node => node.src || node.href)
    .concat(performance.getEntriesByType("resource").map(entry => entry.name))
    .filter(url => /^https?:/.test(url)),
};
"""

RAW_MATHS = re.compile(
    r"\$|\\[(\[]|"
    r"\\(?:frac|sum|log|mathcal|mathbb|text|pi|theta|alpha|beta|left|begin|operatorname)(?![a-zA-Z])"
)
FILE_NAME = re.compile(r"|\S+\.(png|svg|jpe?g)")  # what Sphinx writes where nobody said anything
LEAK = re.compile(r"^\s*#\s?\|\s?\w+", re.MULTILINE)
CONTROL = re.compile(r".{,20}[\x00-\x08\x0b-\x1f].{,20}")  # `"\beta"` written from an ordinary Python string
SOURCE_MATHS = re.compile(r"\$[^$\n]+\$|\$\$|\\\(|\\begin\{")


def open_browser() -> webdriver.Chrome:
    """Headless Chromium with a new profile and no network."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        raise RuntimeError("The book is checked in a real browser: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={mkdtemp(prefix='book-browser-')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@cache
def anchors(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"""\b(?:id|name)=["']([^"']+)["']""", path.read_text(errors="replace")))


def broken_link(href: str) -> str | None:
    """Why a `file://` link leads nowhere, or None."""
    url = urlsplit(href)
    path = Path(unquote(url.path))
    if url.scheme != "file":
        return None
    if not path.is_file():
        return f"broken link: no file {path}"
    if url.fragment and path.suffix == ".html" and unquote(url.fragment) not in anchors(path):
        return f"broken link: no #{url.fragment} in {path.name}"
    return None


def one_colour(src: str) -> bool:
    """True for a bitmap whose pixels are all the same: an empty plot."""
    url = urlsplit(src)
    if url.scheme == "data":
        data = b64decode(url.path.split(",", 1)[1]) if ";base64," in url.path else b""
    else:
        data = Path(unquote(url.path)).read_bytes()
    try:
        image = Image.open(io.BytesIO(data)).convert("RGBA")
    except OSError:
        return False
    return all(low == high for low, high in image.getextrema())


def console_errors(browser: webdriver.Chrome) -> list[str]:
    return [
        f"console: {entry['message'][:300]}"
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE"
    ]


def check_page(browser: webdriver.Chrome, page: Path, *, source: str = "") -> list[str]:
    """The problems of a built page; `source` is the markdown it was made from."""
    browser.get_log("browser")
    browser.get(page.resolve().as_uri())
    problems = []
    try:
        WebDriverWait(browser, 10, poll_frequency=0.05).until(lambda b: b.execute_script(READY))
    except TimeoutException:
        problems.append("the page never finished loading (images or MathJax)")
    seen = browser.execute_script(INSPECT)
    problems += console_errors(browser)
    problems += [
        f"raw maths in the text: {text.strip()[:80]!r}" for text in seen["prose"] if RAW_MATHS.search(text)
    ]
    problems += [
        f"leaked nbdev directive: {LEAK.search(text)[0].strip()!r}"
        for text in seen["prose"] + seen["code"]
        if LEAK.search(text)
    ]
    # Text of a drawing that looks like an address becomes a link in it, whose href is an object.
    problems += [
        f"a link inside a drawing: {href['baseVal']}" for href in seen["links"] if not isinstance(href, str)
    ]
    addresses = {href for href in seen["links"] if isinstance(href, str)}
    problems += sorted({reason for href in addresses if (reason := broken_link(href))})
    problems += [f"image not shown: {image['src'][-80:]}" for image in seen["images"] if not image["width"]]
    problems += [
        f"empty plot: {image['src'][-80:]}"
        for image in seen["images"]
        if image["width"] and image["inArticle"] and one_colour(image["src"])
    ]
    problems += [
        f"image without a text: {image['src'][-80:]}"
        for image in seen["images"]
        if image["inArticle"] and FILE_NAME.fullmatch(image["alt"])
    ]
    problems += ["drawing without a text" for text in seen["drawings"] if not text]
    problems += [f"formula not rendered: {text!r}" for text in seen["unrendered"]]
    problems += sorted({f"formula with an error: {text}" for text in seen["errors"]})
    problems += [f"control character in the source: {found!r}" for found in CONTROL.findall(source)]
    if SOURCE_MATHS.search(source) and not seen["containers"]:
        problems.append("the source has formulas, the page shows none")
    problems += sorted({f"needs the network: {url}" for url in seen["network"]})
    return problems
