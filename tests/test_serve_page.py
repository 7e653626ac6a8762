"""The page of the server: its text, and what it does in a real browser (marker `browser`, see `make test-browser`)."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chats import reasoner
from http_serving import serving
from page_server import PAGE, RECORD, TEXT, PageServer

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.decoding.generate import generate
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions
from nextn.settings import Settings
from nextn.stats.acceptance import Acceptance, expected_length
from nextn.stats.speedup import Costs, Spread, expected_speedup

SOURCE = PAGE.read_text()
SCRIPT = re.search(r"<script>(.*?)</script>", SOURCE, re.DOTALL)[1]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
ROUNDS = [SimpleNamespace(**one, emitted=one["tokens"]) for one in RECORD["rounds"]]
FIGURES = Acceptance.of(SimpleNamespace(rows=(one,)) for one in ROUNDS)
PROMPT = RECORD["prompt"]

browser_test = pytest.mark.browser


# Its text.


class Tags(HTMLParser):
    """The tags of the page with their attributes, and the ids that labels name."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


TAGS = Tags(SOURCE).tags
IDS = [attributes["id"] for _, attributes in TAGS if "id" in attributes]


def policy():
    """The policy with the hashes of the script and the style as they are."""

    def hashed(tag):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", SOURCE, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def test_policy_names_this_script_and_this_style():
    """After a change of the page, put the expected policy into its first meta tags."""
    given = [each["content"] for tag, each in TAGS if each.get("http-equiv") == "Content-Security-Policy"]
    assert given == [policy()]


def test_nothing_is_fetched_from_elsewhere():
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", SOURCE)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert [tag for tag, each in TAGS if each.keys() & {"src", "srcset", "action", "style"}] == []
    assert not any(name.startswith("on") for _, each in TAGS for name in each)


def test_texts_are_inserted_as_text():
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b"
    assert re.findall(unsafe, SCRIPT) == []


def test_ids_that_the_script_uses_exist():
    assert len(IDS) == len(set(IDS))
    named = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) | set(re.findall(r'figure\("([\w-]+)"', SCRIPT))
    assert named
    assert named <= set(IDS)


def test_controls_have_labels():
    inside = re.findall(r"<label(?: id=\"[\w-]+\")?>(?:(?!</label>).)*<input id=\"([\w-]+)\"", SOURCE)
    labelled = {each["for"] for tag, each in TAGS if tag == "label" and "for" in each} | set(inside)
    controls = {each["id"] for tag, each in TAGS if tag in ("input", "textarea") and each.get("type") != "radio"}
    assert controls <= labelled


@pytest.mark.skipif(not shutil.which("node"), reason="checks the syntax of the script with node")
def test_script_is_valid():
    subprocess.run(["node", "--check", "-"], input=SCRIPT, text=True, check=True)


# In a browser.


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server():
    with PageServer() as running:
        yield running


@pytest.fixture
def open_page(chromium, server):
    """open_page(**context) -> a view of the page; requests elsewhere and anything in the console fail the test."""
    views, events = [], []

    def opened(url=None, *, quiet=True, **context):
        url = url or server.url
        view = chromium.new_context(**context).new_page()
        view.set_default_timeout(10_000)
        if quiet:
            view.on("console", lambda message: events.append(f"{message.type}: {message.text}"))
        view.on("pageerror", lambda error: events.append(f"error: {error}"))
        view.on("request", lambda one: one.url.startswith((url, "data:")) or events.append(one.url))
        view.goto(url)
        view.locator("#status[data-state=online]").wait_for()
        views.append(view)
        return view

    yield opened
    for view in views:
        view.context.close()
    assert events == []


def expect(locator):
    """Assertions about an element that wait until they hold: the page draws in steps of its own."""
    from playwright import sync_api  # here, as most tests of this file need no browser

    return sync_api.expect(locator)


def ask(view, text=PROMPT, *, ends=1):
    """Send a message and wait until `ends` answers more are over."""
    done = view.locator("article > footer:not(:empty)")
    before = done.count()
    view.fill("#prompt", text)
    view.press("#prompt", "Enter")
    done.nth(before + ends - 1).wait_for()
    view.locator("#send").wait_for()


def shown_text(view, article=0):
    """The text of an answer's tokens, without rejected drafts."""
    tokens = view.locator("article").nth(article).locator(".tokens .t")
    return tokens.evaluate_all("all => all.map(t => t.textContent).join('')")


def kinds(view, article=0):
    """How many tokens of each kind an answer shows."""
    names = view.locator("article").nth(article).locator(".tokens .t").evaluate_all("all => all.map(t => t.className)")
    return Counter(name for each in names for name in each.split() if name != "t")


def figure(view, name):
    return view.locator(f"#{name}").inner_text().split()[0]


def expect_figure(view, name, value):
    """Wait until a figure has this value, with or without a unit or a comparison behind it."""
    expect(view.locator(f"#{name}")).to_have_text(re.compile(rf"^\s*{re.escape(value)}(\s|$)"))


def recorded_kinds():
    counts = Counter()
    for index, one in enumerate(ROUNDS):
        for at in range(len(one.tokens)):
            if not one.drafts:
                counts["baseline" if index else "prefill"] += 1
            elif at < one.num_accepted:
                counts[f"d{at + 1}"] += 1
            else:
                counts["bonus"] += 1
                counts["replaced"] += one.num_accepted < len(one.drafts)
    return counts


@browser_test
def test_an_answer_streams_with_its_rounds(open_page, server):
    server.delay = 0.02
    view = open_page()
    view.fill("#prompt", "def f():")
    view.press("#prompt", "Shift+Enter")
    view.keyboard.type("    pass")
    view.press("#prompt", "Enter")
    tokens = view.locator(".tokens")
    view.locator(".tokens .t").nth(20).wait_for(state="attached")
    assert len(tokens.inner_text()) < len(TEXT)
    expect(view.locator("#stop")).to_be_visible()
    view.locator("article > footer:not(:empty)").wait_for()
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "def f():\n    pass"}]
    assert body["stream_options"] == {"include_usage": True, "include_rounds": True}
    assert "num_speculative_tokens" not in body
    assert shown_text(view) == TEXT
    assert kinds(view) == recorded_kinds()
    expect(view.locator(".rounds > div")).to_have_count(len(ROUNDS))


@browser_test
def test_the_speed_is_by_the_engines_clock(open_page, server):
    """Events arrive in bursts: by their arrival, a small model had millions of tokens per second."""
    server.round_s = 0.125
    view = open_page()
    ask(view)
    tokens = sum(len(one.tokens) for one in ROUNDS[1:])
    seconds = (len(ROUNDS) - 1) * server.round_s
    expect_figure(view, "speed-on", f"{tokens / seconds:.{0 if tokens >= 100 * seconds else 1}f}")


@browser_test
def test_figures_are_those_of_the_package(open_page, server):
    view = open_page()
    ask(view)
    expect_figure(view, "length", f"{FIGURES.length:.2f}")
    expect(view.locator("#length")).to_contain_text(f"ref. {expected_length(server.reference):.2f}")
    expect_figure(view, "num-rounds", str(FIGURES.num_rounds))
    rows = view.locator("#depths tr").all()
    shown = [row.locator("td").all_inner_texts() for row in rows]
    assert [row[2] for row in shown] == [f"{100 * rate:.1f}" for rate in FIGURES.rates]
    assert [row[4] for row in shown] == [str(num) for num in FIGURES.num_drafted]
    costs = Costs(1, 0, tuple(Spread(v, v, v, 1) for v in RECORD["cost_curve"]), Spread.of([RECORD["draft_cost"]]))
    speedups = view.locator("#speedup tr td:last-child").all_inner_texts()
    expected = [f"{expected_speedup(costs, FIGURES.rates, k):.2f}" for k in range(5)]
    assert [text.split()[-1] for text in speedups[:5]] == expected
    assert set(speedups[5:]) == {"–"}  # depths that were never drafted
    expect(view.locator("#speedup-note")).to_contain_text(f"from {FIGURES.num_rounds} rounds")
    ask(view)
    view.check("[name=scope][value=all]")
    expect_figure(view, "num-rounds", str(2 * FIGURES.num_rounds))
    expect(view.get_by_role("meter", name="KV cache")).to_have_attribute("aria-valuetext", "1,024 of 16,384 positions")


@browser_test
def test_reference_replaces_depths_that_were_not_drafted(open_page, server):
    """Before the first answer, and beyond the K of the answers."""
    view = open_page()
    costs = Costs(1, 0, tuple(Spread(v, v, v, 1) for v in RECORD["cost_curve"]), Spread.of([RECORD["draft_cost"]]))
    shown = view.locator("#speedup tr td:last-child")
    expect(shown.nth(2)).to_have_text(f"{expected_speedup(costs, server.reference, 2):.2f}")
    one = {"tokens": [1, 2], "texts": ["a", "b"], "drafts": [1], "draft_texts": ["a"], "num_accepted": 1}
    server.events = [("ab", [one])] * 10
    ask(view)
    expect(shown.nth(2)).to_have_text(f"{expected_speedup(costs, [1.0, *server.reference[1:]], 2):.2f}")
    expect(view.locator("#speedup-note")).to_contain_text("from 10 rounds, beyond depth 1 from the reference")


@browser_test
def test_speed_is_tokens_by_time_of_arrival(open_page, server):
    server.delay = 0.01
    view = open_page()
    ask(view)
    speed = float(figure(view, "speed-on"))
    ideal = (len(TEXT) - 1) / (0.01 * (len(ROUNDS) - 1))
    assert 0.3 * ideal < speed <= 1.1 * ideal


@browser_test
def test_k_and_other_settings_are_sent(open_page, server):
    view = open_page()
    view.locator("#k").fill("2")
    expect(view.locator("#k-auto")).not_to_be_checked()
    view.fill("#temperature", "0.7")
    view.fill("#max-tokens", "10")
    ask(view)
    body = server.requests[0][1]
    assert (body["num_speculative_tokens"], body["temperature"], body["max_tokens"]) == (2, 0.7, 10)
    assert view.locator("#k").get_attribute("max") == str(len(RECORD["cost_curve"]) - 1)
    view.locator("#k").fill("0")
    ask(view)
    assert server.requests[1][1]["num_speculative_tokens"] == 0
    assert kinds(view, 1) == {"prefill": 1, "baseline": 9}
    expect(view.locator("article").nth(1).locator("h2")).to_have_text("MTP off")


@browser_test
@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_keeps_what_came(open_page, server, by):
    server.delay = 0.05
    view = open_page()
    view.fill("#prompt", "one")
    view.press("#prompt", "Enter")
    view.locator(".tokens .t").nth(5).wait_for(state="attached")
    view.click("#stop") if by == "button" else view.keyboard.press("Escape")
    expect(view.locator("article > footer")).to_contain_text("stopped")
    came = shown_text(view)
    assert TEXT.startswith(came)
    assert 0 < len(came) < len(TEXT)
    server.delay = 0
    ask(view, "two")
    assert [turn["role"] for turn in server.requests[1][1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1][1]["messages"][1]["content"] == came
    assert server.num_cancelled == 1


@browser_test
def test_compare_runs_both_and_says_what_it_found(open_page, server):
    view = open_page()
    view.check("#compare")
    ask(view, ends=2)
    assert [body.get("num_speculative_tokens") for _, body in server.requests] == [None, 0]
    assert server.requests[0][1]["seed"] == server.requests[1][1]["seed"]
    assert server.requests[0][1]["messages"] == server.requests[1][1]["messages"]
    said = view.locator(".outcome").inner_text()
    assert "Both texts are the same." in said
    assert re.search(r"Speedup \d\.\d\d", said)
    boxes = [view.locator("article").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    assert (kinds(view, 0), kinds(view, 1)) == (recorded_kinds(), {"prefill": 1, "baseline": len(TEXT) - 1})
    expect_figure(view, "length", f"{FIGURES.length:.2f}")
    ask(view, "next", ends=2)  # the conversation has one answer per question
    assert [turn["role"] for turn in server.requests[2][1]["messages"]] == ["user", "assistant", "user"]


@browser_test
def test_compare_shows_texts_that_differ(open_page, server):
    view = open_page()
    one = {"tokens": [1], "texts": ["abc"], "drafts": [], "draft_texts": [], "num_accepted": 0}
    answers = iter([[("abc", [one])], [("abX", [{**one, "texts": ["abX"]}])]])
    server.answer = lambda body: next(answers)
    view.check("#compare")
    ask(view, ends=2)
    expect(view.locator(".outcome")).to_contain_text("The texts differ from character 2 on.")


@browser_test
def test_page_reconnects_and_asks_again(open_page, server):
    server.drop_after = 10
    view = open_page(quiet=False)  # a browser reports failed requests in its console
    view.fill("#prompt", "one")
    view.press("#prompt", "Enter")
    alert = view.get_by_role("alert")
    alert.wait_for()
    expect(alert).to_contain_text("The connection was lost.")
    server.stop()
    view.locator("#status[data-state=offline]").wait_for()
    expect(view.locator("#status")).to_contain_text("unreachable")
    server.drop_after = None
    server.start()
    view.locator("#status[data-state=online]").wait_for()
    alert.get_by_role("button", name="Try again").click()
    view.locator("article > footer", has_text="token limit reached").wait_for()
    expect(view.locator("article")).to_have_count(1)
    assert shown_text(view) == TEXT
    assert [turn["role"] for turn in server.requests[-1][1]["messages"]] == ["user"]


@browser_test
def test_api_key_is_asked_for_and_only_remembered_by_the_page(open_page, server):
    server.key = "secret"
    view = open_page(quiet=False)
    ask(view, "one")
    expect(view.get_by_role("alert")).to_contain_text("requires an API key")
    view.fill("#key", "wrong")
    view.press("#key", "Enter")
    ask(view, "one")
    expect(view.get_by_role("alert").last).to_contain_text("does not accept this API key")
    view.fill("#key", "“secret”")  # as some editors quote it: no header can carry it
    view.press("#key", "Enter")
    ask(view, "one")
    expect(view.get_by_role("alert").last).to_contain_text("does not accept this API key")
    view.fill("#key", "secret")
    view.press("#key", "Enter")
    ask(view, "two")
    assert shown_text(view, 3) == TEXT
    assert view.locator("#key").input_value() == ""
    assert view.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])") == '[{},{},""]'
    assert "secret" not in view.content()


@browser_test
def test_a_stopping_server_is_shown(open_page, server):
    view = open_page(quiet=False)
    server.status = "stopping"
    view.locator("#status[data-state=limited]").wait_for()
    expect(view.locator("#status")).to_have_text("The server is stopping")


@browser_test
def test_errors_of_the_server_are_shown(open_page, server):
    view = open_page(quiet=False)
    ask(view, "REFUSE")
    expect(view.get_by_role("alert")).to_contain_text("max_tokens = 0; expected at least 1")
    ask(view, "fine")  # the refused message is not part of the conversation
    assert server.requests[-1][1]["messages"] == [{"role": "user", "content": "fine"}]


@browser_test
def test_only_the_last_message_can_be_sent_again(open_page, server):
    """Sent again, an earlier one would take what came after it out of the conversation, and not off the page."""
    server.drop_after = 10
    view = open_page(quiet=False)
    again = view.get_by_role("button", name="Try again")
    ask(view, "one")
    expect(again).to_have_count(1)
    server.drop_after = None
    ask(view, "two")
    expect(again).to_have_count(0)
    assert [turn["content"] for turn in server.requests[-1][1]["messages"][::2]] == ["one", "two"]


@browser_test
def test_who_has_scrolled_up_stays_there(open_page, server):
    view = open_page(viewport={"width": 1000, "height": 300})
    position = "log => [log.scrollTop, log.scrollHeight - log.clientHeight - log.scrollTop]"
    ask(view)
    top, below = view.locator("#log").evaluate(position)
    assert top > 0
    assert below < 60
    server.delay = 0.01
    view.fill("#prompt", "more")
    view.press("#prompt", "Enter")
    view.locator("article").nth(1).locator(".t").nth(5).wait_for()
    view.locator("#log").evaluate("log => { log.scrollTop = 0; }")
    view.locator("article > footer:not(:empty)").nth(1).wait_for()
    view.locator("#send").wait_for()
    assert view.locator("#log").evaluate(position)[0] == 0


@browser_test
def test_reasoning_is_shown_and_not_sent_back(open_page, server):
    def one(*texts):
        return {"tokens": [1] * len(texts), "texts": list(texts), "drafts": [], "draft_texts": [], "num_accepted": 0}

    server.events = [({"reasoning_content": "Hm."}, [one("<think>", "Hm", ".")]), ("Yes", [one("</think>", "Yes")])]
    view = open_page()
    ask(view, "one")
    spans = view.locator(".tokens .t").evaluate_all("all => all.map(t => [t.textContent, t.className])")
    assert [text for text, _ in spans] == ["<think>", "Hm", ".", "</think>", "Yes"]
    assert [kind for _, kind in spans] == ["t special", "t prefill", "t prefill", "t special", "t baseline"]
    ask(view, "two")
    assert [turn["content"] for turn in server.requests[-1][1]["messages"]] == ["one", "Yes", "two"]


@browser_test
def test_a_server_without_mtp_has_nothing_to_compare(open_page, server):
    server.num_speculative_tokens = 0
    view = open_page()
    for name in ("k", "k-auto", "compare"):
        expect(view.locator(f"#{name}")).to_be_disabled()
    ask(view)
    assert server.requests[0][1]["num_speculative_tokens"] == 0
    expect(view.locator("#speed-off")).to_contain_text("tokens/s")
    expect_figure(view, "speed-on", "–")


@browser_test
def test_html_in_texts_is_text(open_page, server):
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    one = {"tokens": [1], "texts": [attack], "drafts": [2], "draft_texts": [f"{attack}!"], "num_accepted": 0}
    server.events = [(attack, [one])]
    view = open_page()
    view.check("#ghosts")
    ask(view, attack)
    view.locator(".tokens .t").hover()
    assert view.locator("#tip").inner_text().count("<img") == 4
    expect(view.locator(".user")).to_have_text(attack)
    expect(view.locator("#log img, #log script, #tip img")).to_have_count(0)


@browser_test
def test_text_of_broken_tokens_is_whole(open_page, server):
    """Bytes of a character, a token whose leading blank its own text lacks, held-back text, and the end-of-text."""

    def one(*texts, drafts=()):
        accepted = len(texts) - 1
        ids = list(range(len(texts)))
        drafted = {"drafts": list(range(len(drafts))), "draft_texts": list(drafts)}
        return {"tokens": ids, "texts": list(texts), **drafted, "num_accepted": accepted if drafts else 0}

    server.events = [
        ("", [one("\ufffd")]),
        ("é", [one("\ufffd", "a", drafts=["\ufffd", "b"])]),
        ("a yes", [one("yes")]),
        ("", [one("no", "w", drafts=["no"])]),
        (" now", [one("\ufffd", "\ufffd", "\ufffd", "\ufffd", "<|end|>", drafts=["\ufffd"] * 4)]),
        ("🙂", []),
    ]
    view = open_page()
    ask(view)
    spans = view.locator(".tokens .t").evaluate_all("all => all.map(t => [t.textContent, t.className])")
    assert [text for text, _ in spans] == ["é", "a", " yes", " no", "w", "🙂", "<|end|>"]
    assert spans[0][1] == "t d1"
    assert spans[-1][1] == "t special"
    server.events = [("hi", [one("hi", "<|end|>", drafts=["hi"])])]
    ask(view)
    assert server.requests[1][1]["messages"][1]["content"] == "éa yes now🙂"


@browser_test
def test_a_server_without_rounds_is_usable(open_page, server):
    server.events = [("Hello ", None), ("there", None)]
    view = open_page()
    ask(view)
    expect(view.locator(".tokens")).to_have_text("Hello there")
    server.events = None
    ask(view)
    view.check("[name=scope][value=all]")
    expect(view.locator("#speed-on")).to_contain_text("tokens/s")  # that of the answer with rounds


@browser_test
def test_model_without_chat_template_continues_text(open_page, server):
    server.chat = False
    view = open_page()
    expect(view.locator("#plain-text")).to_be_visible()
    ask(view, "def add(")
    ask(view, "def sub(")
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 2
    assert server.requests[1][1]["prompt"] == f"def add({TEXT}\ndef sub("


@browser_test
def test_new_chat_forgets(open_page, server):
    view = open_page()
    ask(view, "one")
    view.click("#clear")
    expect(view.locator(".turn")).to_have_count(0)
    ask(view, "two")
    assert server.requests[1][1]["messages"] == [{"role": "user", "content": "two"}]


@browser_test
def test_rejected_drafts_are_shown_on_hover_and_on_demand(open_page):
    view = open_page()
    ask(view)
    index, one = next((i, r) for i, r in enumerate(ROUNDS) if 0 < r.num_accepted < len(r.drafts))
    replaced = view.locator(".tokens .replaced").first
    expect(view.locator(".ghost").first).not_to_be_visible()
    replaced.hover()
    tip = view.locator("#tip").inner_text()
    bonus, lost = one.texts[one.num_accepted], one.draft_texts[one.num_accepted]
    assert f"round {index}" in tip
    assert f"{one.num_accepted} of {len(one.drafts)} drafts accepted, “{lost}” replaced by “{bonus}”" in tip
    expect(view.locator(".tokens .same")).to_have_count(len(one.tokens))
    view.mouse.move(5, 5)
    expect(view.locator("#tip")).not_to_be_visible()
    view.check("#ghosts")
    expect(view.locator(".ghost").first).to_have_text("".join(one.draft_texts[one.num_accepted :]))


@browser_test
def test_a_tap_shows_the_round(open_page):
    view = open_page(**PHONE)
    ask(view)
    view.locator(".tokens .replaced").first.tap()
    expect(view.locator("#tip")).to_contain_text("replaced by")
    box = view.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    view.locator(".user").tap()
    expect(view.locator("#tip")).not_to_be_visible()


@browser_test
def test_keyboard_alone_is_enough(open_page, server):
    view = open_page()
    assert view.evaluate("document.activeElement.id") == "prompt"
    view.keyboard.type("hi")
    view.keyboard.press("Enter")
    view.locator("article > footer:not(:empty)").wait_for()
    wanted = ["clear", "theme", "tokens", "prompt", "send", "k", "k-auto", "temperature", "max-tokens", "compare"]
    order = []
    view.evaluate("document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus()")
    while wanted[-1] not in order and len(order) < 20:
        view.keyboard.press("Tab")
        order.append(view.evaluate("document.activeElement.id || document.activeElement.className"))
    assert [name for name in order if name in wanted] == wanted
    view.locator(".tokens").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "ArrowRight"):
        view.keyboard.press(key)
    expect(view.locator(".tokens .selected")).to_have_text(ROUNDS[1].texts[0])
    assert "Accepted draft, depth 1" in view.locator("#described").text_content()
    view.keyboard.press("Escape")
    expect(view.locator("#tip")).not_to_be_visible()


@browser_test
def test_screen_readers_hear_text_not_tokens(open_page):
    view = open_page()
    ask(view)
    spoken = view.locator("#spoken")
    assert spoken.get_attribute("aria-live") == "polite"
    assert spoken.text_content()
    assert TEXT.endswith(spoken.text_content())
    expect(view.locator("[aria-live] .t, [role=log], [role=status] .t")).to_have_count(0)
    unnamed = """() => ['button', 'input', 'textarea', '[role=group]', '[role=meter]', 'svg[role=img]']
        .flatMap(name => [...document.querySelectorAll(name)])
        .filter(e => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim()))
        .map(e => e.outerHTML)"""
    assert view.evaluate(unnamed) == []


_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('.sr, :disabled, .unused, script')) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) poor.push(`${e.className || e.id || e.tagName} ${contrast.toFixed(2)}`);
  }
  return [...new Set(poor)];
}"""
_BRIGHTNESS = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_follow_the_system_and_the_button(open_page, scheme):
    view = open_page(color_scheme=scheme)
    is_dark = scheme == "dark"
    assert (view.evaluate(_BRIGHTNESS) < 64) == is_dark
    ask(view)
    view.check("#ghosts")
    assert view.evaluate(_CONTRAST) == []
    view.click("#theme")
    assert (view.evaluate(_BRIGHTNESS) < 64) != is_dark
    assert view.evaluate(_CONTRAST) == []
    expect(view.locator("#theme")).to_have_attribute("aria-label", f"Switch to the {scheme} theme")


@browser_test
def test_kinds_differ_in_more_than_color(open_page):
    view = open_page()
    lines = """all => all.map(t => getComputedStyle(t)).map(s =>
        [s.textDecorationStyle, s.textDecorationThickness, s.borderLeftWidth].join(' '))"""
    styles = view.locator("#legend .t").evaluate_all(lines)
    assert len(set(styles)) == len(styles) == 9


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width(open_page, scheme):
    view = open_page(**PHONE, color_scheme=scheme)
    wide = "[document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth <= innerWidth]"
    ask(view, "word" * 200)
    assert view.evaluate(wide) == [360, True]
    expect(view.locator("#panel")).not_to_be_visible()
    view.click("#settings summary")
    view.check("#compare")
    ask(view, ends=2)
    tops = [view.locator("article").nth(index).bounding_box()["y"] for index in (1, 2)]
    assert tops[0] < tops[1]  # one below the other
    assert view.evaluate(wide) == [360, True]
    view.click("#show-panel")
    expect(view.locator("#panel")).to_be_visible()
    expect(view.locator("#log")).not_to_be_visible()
    assert view.evaluate("document.querySelector('#panel').scrollWidth") <= 360
    sizes = view.locator("button:visible").evaluate_all("all => all.map(b => b.getBoundingClientRect().height)")
    assert min(sizes) >= 24
    view.click("#show-panel")
    expect(view.locator("#log")).to_be_visible()


@browser_test
def test_reduced_motion_is_respected(open_page, server):
    server.delay = 0.05
    view = open_page(reduced_motion="reduce")
    view.fill("#prompt", "one")
    view.press("#prompt", "Enter")
    view.locator(".caret").wait_for()
    assert view.locator(".caret").evaluate("e => getComputedStyle(e, '::after').animationName") == "none"


# With the real server.


@pytest.fixture(scope="module")
def real():
    """The server with the checkpoint in the package; it has no chat template."""
    model = Model.load(SHIPPED, dtype=torch.float32)  # no near ties, which torch may break otherwise with MTP
    options = EngineOptions("torch", max_num_seqs=2, max_model_len=256, num_speculative_tokens=4, warmup=False)
    with serving(ServingEngine(model, options), model) as running:
        yield SimpleNamespace(url=f"{running.url}/", model=model)


@browser_test
def test_answers_of_the_real_server(open_page, real):
    """Text, rounds and figures are those of the library; with MTP off, the text is the same."""
    expected = generate(real.model, [PROMPT], Settings(num_speculative_tokens=4, max_tokens=100), backend="torch")[0]
    view = open_page(real.url)
    view.locator("#k").fill("4")
    view.fill("#max-tokens", "100")
    view.check("#compare")
    ask(view, ends=2)
    assert shown_text(view, 0) == shown_text(view, 1) == expected.text
    expect(view.locator(".outcome")).to_contain_text("Both texts are the same.")
    expect_figure(view, "length", f"{expected.acceptance.length:.2f}")
    expect_figure(view, "num-rounds", str(expected.acceptance.num_rounds))
    assert kinds(view, 1) == {"prefill": 1, "baseline": 99}


@browser_test
def test_stop_reaches_the_real_server(open_page, real):
    view = open_page(real.url)
    view.fill("#max-tokens", "240")
    view.fill("#temperature", "1")
    view.fill("#prompt", "def f(")
    view.press("#prompt", "Enter")
    view.locator(".tokens .t").nth(3).wait_for(state="attached")
    view.keyboard.press("Escape")
    expect(view.locator("article > footer")).to_contain_text("stopped")
    ask(view, "x = 1")
    assert shown_text(view, 1)
    view.locator("#running", has_text="0").wait_for()


@browser_test
def test_errors_of_the_real_server(open_page, real):
    view = open_page(real.url, quiet=False)
    ask(view, "x" * 2000)
    expect(view.get_by_role("alert")).to_contain_text("maximum context length is 256 tokens")


# OpenAI's JavaScript client in a page of another origin.


CLIENT = """
<!doctype html><link rel="icon" href="data:,">
<script type="module">import OpenAI from "/openai/index.mjs"; window.OpenAI = OpenAI</script>
"""
ASK = """async ([baseURL, apiKey, kind, streamed]) => {
  const client = new OpenAI({baseURL, apiKey, dangerouslyAllowBrowser: true, maxRetries: 0})
  const shared = {model: "tiny", temperature: 0, stream: streamed}
  const messages = [{role: "user", content: "def add("}]
  const ask = {
    models: () => client.models.list(),
    completions: () => client.completions.create({...shared, prompt: "def add(", max_tokens: 12}),
    chat: () => client.chat.completions.create({...shared, messages, max_tokens: 12}),
    responses: () => client.responses.create({...shared, input: "def add(", max_output_tokens: 12}),
  }[kind]
  const text = {
    models: one => one.data[0].id,
    completions: one => one.choices[0]?.text,
    chat: one => streamed ? one.choices[0]?.delta.content : one.choices[0].message.content,
    responses: one => streamed ? one.type === "response.output_text.delta" && one.delta : one.output_text,
  }[kind]
  try {
    const answer = await ask()
    if (!streamed) return text(answer)
    let all = ""
    for await (const part of answer) all += text(part) || ""
    return all
  } catch (error) {
    return `${error.constructor.name} ${error.status}`
  }
}"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The address of a page that has the client."""
    installed = Path(os.environ.get("OPENAI_JS", "node_modules/openai")).resolve()
    if not (installed / "index.mjs").exists():
        pytest.skip(f"{installed} is not there: npm install openai, and OPENAI_JS=its folder")
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "index.html").write_text(CLIENT)
    (folder / "openai").symlink_to(installed)

    class Files(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

        def log_message(self, *_):
            pass

    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{files.server_port}"
    files.shutdown()
    files.server_close()


@browser_test
def test_the_javascript_client_from_another_origin(chromium, elsewhere):
    """Its own headers pass the preflight; texts are the same streamed or not; errors of the server are readable."""
    model = Model.load(SHIPPED, dtype=torch.float32)
    model.tokenizer = reasoner()
    options = EngineOptions("torch", max_num_seqs=2, max_model_len=256, num_speculative_tokens=4, warmup=False)
    page = chromium.new_context().new_page()
    page.goto(elsewhere)
    page.wait_for_function("Boolean(window.OpenAI)")
    with serving(ServingEngine(model, options), model, cors_origins=(elsewhere,), api_key="key") as running:
        for kind in ("completions", "chat", "responses"):
            texts = [page.evaluate(ASK, [f"{running.url}/v1", "key", kind, streamed]) for streamed in (False, True)]
            assert texts[0] == texts[1], kind
            assert 8 < len(texts[0]) <= 12, (kind, texts)
        assert page.evaluate(ASK, [f"{running.url}/v1", "key", "models", False]) == "tiny"
        assert page.evaluate(ASK, [f"{running.url}/v1", "wrong", "chat", False]) == "AuthenticationError 401"
    with serving(ServingEngine(model, options), model, cors_origins=("http://127.0.0.1:1",)) as running:
        refused = page.evaluate(ASK, [f"{running.url}/v1", "key", "chat", False])
    assert refused.endswith(" undefined")  # without a status: the browser keeps the answer from the page
    page.context.close()
