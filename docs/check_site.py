"""Check the site that `mkdocs build` wrote: links, anchors, pictures, empty pages, nothing fetched from elsewhere.

    python docs/check_site.py [--browser]

`--browser` opens every page in a headless Chromium as well (`pip install playwright`, and a Chromium that it finds or
that CHROMIUM names), and reports requests to other hosts, errors in the console, and pictures that are not shown.
"""

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[1] / "site"
MIN_WORDS = 50
_HIDDEN = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
# Attributes with an address that a browser fetches on its own.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


class Page(HTMLParser):
    """What a page of the site links to, fetches and says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.num_headings = self.num_words = 0
        self._article = self._skipped = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self._article += tag == "article"
        self._skipped += tag in ("script", "style")
        self.num_headings += tag == "h1"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in FETCHED and FETCHED[tag] in given and given.get("rel") != "canonical":
            self.fetched.append(given[FETCHED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._article -= tag == "article"
        self._skipped -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._article and not self._skipped:
            self.num_words += len(data.split())


def defects(site: Path = SITE) -> Iterator[str]:
    """Yield what is wrong with the pages of a built site."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no pages; run `mkdocs build`"
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        name = path.relative_to(site)
        if page.num_headings != 1:
            yield f"{name}: {page.num_headings} first-level headings"
        if page.num_words < MIN_WORDS:
            yield f"{name}: {page.num_words} words"
        yield from (f"{name}: fetches {address}" for address in page.fetched if urlsplit(address).netloc)
        for address in (*page.links, *page.fetched):
            yield from (f"{name}: {address}: {reason}" for reason in _dead(path, address, pages))


def _dead(page: Path, address: str, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        yield "no such file"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        yield "no such anchor"


def seen(site: Path = SITE) -> Iterator[str]:
    """Yield what a browser reports about each page, served from this machine."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        view, events = browser.new_page(), []
        view.on("request", lambda request: events.append(f"requests {request.url}"))
        view.on("response", lambda reply: events.append(f"{reply.status} {reply.url}") if reply.status >= 400 else None)
        view.on("pageerror", lambda error: events.append(f"error {error}"))
        for path in sorted(site.rglob("*.html")):
            events.clear()
            view.goto(f"{here}/{path.relative_to(site)}", wait_until="networkidle")
            events += [f"not shown: {src}" for src in view.evaluate(_HIDDEN)]
            if path.name != "404.html" and not view.locator("h1").first.is_visible():
                events.append("its heading cannot be seen")
            yield from (
                f"{path.relative_to(site)}: {each}" for each in events if not each.startswith(f"requests {here}")
            )
        browser.close()
    server.shutdown()


class Silent(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    found = list(defects())
    if "--browser" in sys.argv[1:] and not found:
        found = list(seen())
    sys.exit("\n".join(found) or 0)
