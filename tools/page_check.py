"""Drives the server's page in a headless Chromium against a real model, and takes the pictures in the docs.

    python tools/page_check.py [--model smollm2] [--pictures docs/images]

Chat, hostile Markdown that the model is made to write, keyboard alone, contrast, phone and desktop, dark and light,
errors, and pages of other sites (DNS rebinding). Needs chromium and chromedriver (apt-get install chromium
chromium-driver). Exits 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server"), str(ROOT / "tools" / "bench")]

from browser_case import Browser, browser, missing, wait_until  # noqa: E402
from hostile_markdown import ATTACKS, SHOWCASE, TAGS  # noqa: E402
from serve_case import Server, ask, served  # noqa: E402

OPTIONS = ("--max-sequence-length", "1024", "--buffer-size-gb", "0.5", "--control")
QUESTIONS = (
    "What is the capital of France? One sentence.",
    "How do I read a text file in Python? Give a short code block and a list of two hints.",
)
MAX_BYTES = 150 * 1024
DESKTOP, PHONE = (1440, 900), (390, 844)
ENTER, SHIFT, TAB, ESCAPE = "\ue007", "\ue008", "\ue004", "\ue00c"
EVIL = "127.evil.example"
READS = [(path, None) for path in ("/", "/v1/status", "/v1/models", "/metrics", "/health", "/static/page.js")]
USES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/tokenize", {"prompt": "a"}),
]
STEERS = [("/pause", {}), ("/sleep", {})]
ADDED = """
const server = window.fetch;
window.added = {};
const withAdded = (body) => body && JSON.stringify({ ...JSON.parse(body), ...window.added });
window.fetch = (path, options = {}) => server(path, { ...options, body: withAdded(options.body) });
"""
"""What is in `window.added` goes with the page's calls, so that the model can be made to write a given text."""
WATCH = """
window.seen = [];
const note = () => window.seen.push([...document.querySelectorAll(".assistant .text")].pop()?.innerText || "");
new MutationObserver(note).observe(document.getElementById("log"), {childList: true, subtree: true});
"""
"""Keeps every state of the answer that the page shows."""
FOREIGN = """
const [tags, own] = [new Set(arguments[0]), new Set(["div", "span", "button"])];
const harmless = new Set(["class", "start", "href", "rel", "target", "type", "tabindex"]);
const found = [];
for (const one of document.querySelectorAll(".assistant .text *")) {
  const tag = one.tagName.toLowerCase();
  if (!tags.has(tag) && !(own.has(tag) && /^(code|bar|scroller|host|)$/.test(one.className))) found.push(tag);
  for (const attribute of one.attributes) if (!harmless.has(attribute.name)) found.push(`${tag} ${attribute.name}`);
  if (tag === "a" && !(/^https?:$/.test(one.protocol) && one.rel.includes("noopener"))) found.push(one.outerHTML);
}
if ("pwned" in window) found.push("a script ran");
const hosts = performance.getEntriesByType("resource").map((entry) => new URL(entry.name).host);
return [...found, ...hosts.filter((host) => host !== location.host)];
"""
"""What an answer must not become: other elements, attributes or links, scripts that ran, loads from elsewhere."""
FAINT = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgb = (color) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const color = rgb(getComputedStyle(one).backgroundColor);
    if (color[3] === 255) return color;
  }
  return [255, 255, 255, 255];
};
const faint = [];
for (const one of document.querySelectorAll("body *")) {
  const box = one.getBoundingClientRect();
  if (!box.width || one.closest(":disabled, .unseen, .skip, noscript") || !one.checkVisibility()) continue;
  const style = getComputedStyle(one);
  const says = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const got = ratio(rgb(one.namespaceURI.endsWith("svg") ? style.fill : style.color), behind(one));
  if (says && got < 4.5) faint.push(`text ${one.tagName} ${one.className}: ${got.toFixed(2)}`);
  if (one.matches("input, textarea, select")) {
    const edge = ratio(rgb(style.borderTopColor), behind(one.parentElement));
    if (edge < 3) faint.push(`edge of ${one.id}: ${edge.toFixed(2)}`);
  }
}
return faint;
"""
"""Texts of less than 4.5:1 and edges of fields of less than 3:1 (WCAG 2.2 AA)."""
CAN_HAVE_FOCUS = """
return [...document.querySelectorAll("a[href], button, input, select, textarea, [tabindex='0']")]
  .filter((one) => one.checkVisibility() && !one.disabled && !one.closest("noscript")).length;
"""
FOCUS = """
const one = document.activeElement;
const style = getComputedStyle(one);
window.reached ||= new Set();
if (one !== document.body) window.reached.add(one); // it has the focus between the last and the first
return [window.reached.size, one.id || one.className || one.innerText,
        one === document.body || style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
"""


def say(page: Browser, text: str, **fields: object) -> str:
    """Asks, with `fields` beside the page's own, and returns the answer when it is whole."""
    page.run("window.added = arguments[0]", fields)
    page.type("#text", text + ENTER)
    wait_until(lambda: page.shown("#send") and not page.run("return document.querySelector('.drawing')"), 180)
    page.run("window.added = {}")
    return str(page.run("return [...document.querySelectorAll('.assistant .text')].pop().innerText"))


def new_page(page: Browser, url: str) -> None:
    page.open(url)
    wait_until(lambda: page.text("#state") == "ok")
    page.run(ADDED)
    page.run("document.getElementById('temperature').value = 0")


def check_chat(page: Browser) -> None:
    """A chat is answered, and can be read while it is drawn; a screen reader gets it whole."""
    answer = say(page, QUESTIONS[0])
    assert answer in page.run("return document.getElementById('spoken').textContent")
    page.run(WATCH)
    say(page, QUESTIONS[1])
    seen = {text for text in page.run("return window.seen") if text}
    print(f"chat: {answer!r}; {len(seen)} states of the next were seen; {page.text('.assistant .who')}")
    assert "Paris" in answer, "the model knows this one"
    assert len(seen) >= 3, "it came at once, not as it was drawn"
    assert "tokens/s" in page.text(".assistant .who")
    assert page.complaints() == []


def check_hostile_answers(page: Browser) -> None:
    """The model writes each attack; it is shown as text, nothing of it runs or is loaded."""
    texts = [attack.encode("utf-8", "ignore").decode() for attack in ATTACKS]  # JSON has no half characters
    for attack in texts:
        page.click("#clear")
        answer = say(page, "Go.", guided_choice=[attack], max_tokens=400)
        assert page.shown(".turn .failure") == [] and len(answer) > len(attack) // 3, (attack, page.text("#log"))
        assert page.run(FOREIGN, sorted(TAGS)) == [], attack
    show = (
        "const {show} = await import('/static/markdown.js'); const box = document.querySelector('.assistant .text'); "
    )
    for attack in (*texts, "\n\n".join(texts)):
        page.run(show + "show(box, arguments[0])", attack)
        assert page.run(FOREIGN, sorted(TAGS)) == [], attack
    assert page.complaints() == []
    print(f"hostile Markdown: {len(texts)} texts written by the model, and all at once: shown as text")


def check_following(page: Browser) -> None:
    """The log follows the answer until its reader scrolls up, and again when asked; Escape stops."""
    page.look(DESKTOP[0], 560)
    page.click("#clear")
    page.run("window.added = {ignore_eos: true, max_tokens: 700}")
    page.type("#text", "Tell a long story." + ENTER)
    left = "const log = document.getElementById('log'); return log.scrollHeight - log.clientHeight - log.scrollTop"
    length = "return document.querySelector('.assistant .text').innerText.length"
    overflow = "const log = document.getElementById('log'); return log.scrollHeight - log.clientHeight"
    wait_until(lambda: page.run(overflow) > 120)
    assert page.run(left) < 2 and page.shown("#newest") == []
    page.scroll("#log", -60)
    wait_until(lambda: page.shown("#newest"))
    place, before = page.run("return document.getElementById('log').scrollTop"), page.run(length)
    wait_until(lambda: page.run(length) > before + 150)
    assert page.run("return document.getElementById('log').scrollTop") == place, "it moved under its reader"
    page.click("#newest")
    before = page.run(length)
    wait_until(lambda: page.run(length) > before + 50)
    assert page.run(left) < 2 and page.shown("#newest") == []
    look = "const s = getComputedStyle(document.querySelector(arguments[0])); return [s.backgroundColor, s.color]"
    assert page.run(look, "#stop") != page.run(look, "#clear") and page.shown("#send") == []
    page.press(ESCAPE)
    wait_until(lambda: page.shown("#send"))
    assert "stopped" in page.text(".assistant .who") and page.shown("#stop") == []
    page.click("#clear")
    page.type("#text", "Another long story.")
    page.double_click("#send")
    wait_until(lambda: page.run("return document.querySelectorAll('.assistant .text').length") == 1)
    time.sleep(1)
    assert page.shown("#stop"), f"a double click on Send stopped the answer: {page.text('#log')}"
    page.click("#stop")
    wait_until(lambda: page.shown("#send"))
    page.run("window.added = {}")
    print("following: at the end while drawn, still while read, Newest, Escape, Stop, double click on Send")


def check_keyboard(page: Browser, url: str) -> None:
    """Keys alone: skip link, message, line break, send, stop; everything is reached and its focus is seen."""
    new_page(page, url)
    page.press(TAB)
    assert page.run("return document.activeElement.className") == "skip"
    page.press(ENTER)
    assert page.run("return document.activeElement.id") == "text"
    page.run("window.added = {ignore_eos: true}")
    for key in "Hi":
        page.press(key)
    page.press(SHIFT, ENTER)
    page.press("a")
    page.press(ENTER)
    wait_until(lambda: page.shown("#stop"))
    assert page.text(".user .text") == "Hi\na"
    page.press(TAB)
    assert page.run("return document.activeElement.id") == "stop"
    page.press(ENTER)
    wait_until(lambda: page.shown("#send"))
    assert page.run("return document.activeElement.id") == "text" and "stopped" in page.text(".assistant .who")
    page.run("document.getElementById('text').blur(); window.reached = new Set()")
    wanted = page.run(CAN_HAVE_FOCUS)
    for _ in range(wanted + 1):
        page.press(TAB)
        reached, name, is_seen = page.run(FOCUS)
        assert is_seen, f"the focus of {name} cannot be seen"
    assert reached == wanted, f"{reached} of {wanted} were reached by Tab"
    page.run("document.querySelector('.legend [data-kind=cached]').focus()")
    wait_until(lambda: "kept for prompts that begin alike" in page.text(".explanation"))
    print(f"keyboard: {wanted} elements reached by Tab, the focus of each is seen; sends, breaks lines, stops")


def check_theme(page: Browser, url: str) -> None:
    """The system's colours, unless others are chosen; the choice is kept, and nothing else."""
    back = "return getComputedStyle(document.body).backgroundColor"
    page.look(*DESKTOP)
    light = page.run(back)
    page.look(*DESKTOP, dark=True)
    dark = page.run(back)
    assert light != dark
    page.look(*DESKTOP)
    for choice, color in (("dark", dark), ("light", light), ("system", light)):
        page.click(f"#theme option[value={choice}]")
        new_page(page, url)
        assert page.run(back) == color and page.run("return JSON.stringify(localStorage)") == f'{{"theme":"{choice}"}}'
    print("theme: follows the system, a choice is kept")


def check_looks(page: Browser) -> None:
    """No part is wider than the screen, no text is faint, at any size, in both colours, with all kinds of Markdown."""
    say(page, "Go.", guided_choice=[SHOWCASE], max_tokens=400)
    wide = "return Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - innerWidth"
    parts = "[...document.querySelectorAll('#log, #engines, #ask')]"
    inner = f"return {parts}.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.id)"
    for width, height in (DESKTOP, (1024, 600), (768, 1024), PHONE, (320, 568)):
        for dark in (False, True):
            page.look(width, height, dark=dark, phone=width < 500)
            for view in ("chat", "engines"):
                page.run("document.querySelector(`#views [data-view=${arguments[0]}]`).click()", view)
                time.sleep(0.3)
                assert page.run(wide) <= 0 and page.run(inner) == [], (width, view, page.run(inner))
                assert page.run(FAINT) == [], (width, dark, view, page.run(FAINT))
    page.run("document.querySelector('#views [data-view=chat]').click()")
    page.look(*DESKTOP)
    assert page.complaints() == []
    print("looks: 5 sizes from 320 to 1440, dark and light: nothing wider than the screen, contrast of WCAG AA")


@contextlib.contextmanager
def load(page: Browser, url: str) -> Iterator[None]:
    """Others' requests, which show in the figures."""
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            ask(url, {"max_tokens": 200, "ignore_eos": True, "prompt": f"Story {number}. Once upon a time"})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: page.text("#running") == "6")
        wait_until(lambda: float((page.text("#rate") or "0").replace(",", "")) > 1)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def take_pictures(page: Browser, url: str, folder: Path | None) -> None:
    """Of a chat under load: desktop and phone, light and dark."""
    page.look(*DESKTOP)
    new_page(page, url)
    for question in QUESTIONS:
        say(page, question)
    with load(page, url):
        time.sleep(40)
        print(f"under load: {page.text('#rate')} tokens/s; {page.shown('.replica p')}")
        for name, size, dark, view in (
            ("server_page", DESKTOP, False, "chat"),
            ("server_page_dark", DESKTOP, True, "chat"),
            ("server_page_phone", PHONE, False, "chat"),
            ("server_page_phone_dark", PHONE, True, "engines"),
        ):
            page.look(*size, dark=dark, phone=size == PHONE)
            page.run("document.querySelector(`#views [data-view=${arguments[0]}]`).click()", view)
            page.run("document.activeElement.blur()")
            time.sleep(1.5)
            picture = page.screenshot()
            assert len(picture) < MAX_BYTES, f"{name} has {len(picture):,} bytes"
            if folder is not None:
                (folder / f"{name}.png").write_bytes(picture)
    page.look(*DESKTOP)
    assert page.complaints() == []


def check_errors(page: Browser) -> None:
    """What the server refuses is said in words, and the message is not lost."""
    page.click("#clear")
    page.run("document.getElementById('max-tokens').value = 5000")
    page.type("#text", "Too much" + ENTER)
    wait_until(lambda: page.shown(".turn .failure"))
    words = page.text(".turn .failure")
    print(f"refused: {words}")
    assert "1,024" in words.replace("1024", "1,024") and "(400)" in words
    assert page.run("return document.getElementById('text').value") == "Too much"
    page.run("document.getElementById('max-tokens').value = 400; document.getElementById('text').value = ''")


def check_server_gone(page: Browser, server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: page.text("#state") == "no answer")
    page.type("#text", "Anybody?" + ENTER)
    wait_until(lambda: "cannot be reached" in (page.text(".turn:last-of-type .failure") or ""))
    print(f"server gone: {page.text('#problem')}")
    assert "cannot be reached" in page.text("#problem")
    assert page.run("return document.getElementById('text').value") == "Anybody?"


CALLS = """
const [server, calls, mode, type] = arguments;
const answers = {};
for (const [path, body] of calls) {
  const post = { method: "POST", headers: { "Content-Type": type }, body: JSON.stringify(body) };
  const options = { mode, signal: AbortSignal.timeout(20000), ...(body ? post : {}) };
  answers[path] = await fetch(server + path, options).then((reply) => reply.status, () => "no reply");
}
return answers;
"""
"""What a page's script gets from the server: of each path the status, 0 where the browser hides it, or "no reply"."""


class EmptyPage(http.server.BaseHTTPRequestHandler):
    """What another site serves."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def at_rest(server: Server) -> list[tuple[str, int]]:
    """State and tokens drawn of each replica, once a second and a half changes nothing."""

    def figures() -> list[tuple[str, int]]:
        return [(one["state"], one["output_tokens"]) for one in server.get("/v1/status")["replicas"]]

    last, now = None, figures()
    while last != now:
        time.sleep(1.5)
        last, now = now, figures()
    return now


def check_other_sites(page: Browser, server: Server) -> None:
    """A page that has a name leading here (DNS rebinding), and one of another site, get nothing and steer nothing."""
    port = urlsplit(server.url).port
    before = at_rest(server)
    page.open(f"http://{EVIL}:{port}/")
    assert page.run("return location.hostname") == EVIL and "host_not_allowed" in page.text("body")
    rebound = page.run(CALLS, "", READS + USES + STEERS, "same-origin", "application/json")
    assert set(rebound.values()) == {403}, rebound
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page.open(f"http://page.evil.example:{other.server_port}/")
        asked = page.run(CALLS, server.url, READS + USES + STEERS, "cors", "application/json")
        assert set(asked.values()) == {"no reply"}, asked
        sent = page.run(CALLS, server.url, READS + USES + STEERS, "no-cors", "text/plain")
        assert set(sent.values()) <= {0, "no reply"}, sent
        other.shutdown()
    assert at_rest(server) == before

    page.open(f"http://localhost:{port}/")
    own = page.run(CALLS, "", READS + USES, "same-origin", "application/json")
    assert set(own.values()) == {200}, own
    print(
        f"other sites: {EVIL} got 403 {len(rebound)} times, page.evil.example nothing; localhost, the same calls: 200"
    )
    page.complaints()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures of the page")
    args = parser.parse_args()
    if missing():
        print(f"not installed: {', '.join(missing())}", file=sys.stderr)
        return 1
    with (
        served(args.model, *OPTIONS) as server,
        tempfile.TemporaryDirectory() as folder,
        browser(folder, hosts="MAP *.evil.example 127.0.0.1") as page,
    ):
        print(json.loads(json.dumps(page.devtools("Browser.getVersion")))["product"])
        page.look(*DESKTOP)
        new_page(page, server.url)
        check_chat(page)
        check_hostile_answers(page)
        check_looks(page)
        check_following(page)
        page.look(*DESKTOP)
        check_keyboard(page, server.url)
        check_theme(page, server.url)
        take_pictures(page, server.url, args.pictures)
        check_other_sites(page, server)
        new_page(page, server.url)
        check_errors(page)
        check_server_gone(page, server)
    print("the page is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
