"""Drives the server's page in a headless Chromium against a real model, and takes the picture in the docs.

    python tools/page_check.py [--model smollm2] [--screenshot docs/images/server_page.png] [--dark]

Needs chromium and chromedriver (apt-get install chromium chromium-driver). Exits 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server"), str(ROOT / "tools" / "bench")]

from browser_case import Browser, browser, missing, wait_until  # noqa: E402
from serve_case import ask, served  # noqa: E402

QUESTION = "What is the capital of France? One sentence."
MAX_BYTES = 150_000
WATCH = """
window.seen = [];
const note = () => window.seen.push((document.querySelector(".turn.assistant p") || {}).textContent || "");
new MutationObserver(note).observe(document.getElementById("log"), {childList: true, subtree: true});
"""
"""Keeps every state of the answer that the page shows."""


def check_chat(page: Browser) -> None:
    """A chat is answered, and can be read while it is drawn."""
    page.run("document.getElementById('temperature').value = 0; document.getElementById('max-tokens').value = 60")
    page.run(WATCH)
    page.type("#text", QUESTION + "\ue007")
    wait_until(lambda: "tokens" in (page.text(".turn.assistant .who") or ""))
    seen = page.run("return window.seen")
    answer = page.text(".turn.assistant p")
    print(f"answer: {answer!r}; {len(set(seen))} states of it were seen; {page.text('.turn.assistant .who')}")
    assert "Paris" in answer, "the model knows this one"
    assert len(set(seen)) >= 3, "it came at once, not as it was drawn"
    assert page.shown("#controls button") == [], "buttons that steer, without --control"
    assert page.complaints() == [], page.complaints()


def check_load(page: Browser, url: str, stop: threading.Event) -> list[threading.Thread]:
    """Others' requests show in the figures."""
    body = {"max_tokens": 256, "temperature": 0, "ignore_eos": True}

    def load(number: int) -> None:
        while not stop.is_set():
            ask(url, {**body, "prompt": f"Story {number}. Once upon a time"})

    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: page.text("#running") == "6")
    wait_until(lambda: float((page.text("#rate") or "0").replace(",", "")) > 1)
    time.sleep(8)
    print(f"under load: {page.text('#rate')} tokens/s; {page.shown('.replica p')}")
    return threads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    if missing():
        print(f"not installed: {', '.join(missing())}", file=sys.stderr)
        return 1
    options = ("--max-sequence-length", "1024", "--buffer-size-gb", "0.25")
    with (
        served(args.model, *options) as server,
        tempfile.TemporaryDirectory() as folder,
        browser(folder, dark=args.dark) as page,
    ):
        page.open(server.url)
        wait_until(lambda: page.text("#state") == "ok")
        check_chat(page)
        stop = threading.Event()
        threads = check_load(page, server.url, stop)
        if args.screenshot is not None:
            picture = page.screenshot()
            assert len(picture) < MAX_BYTES, f"the picture has {len(picture):,} bytes"
            args.screenshot.write_bytes(picture)
        stop.set()
        for thread in threads:
            thread.join()
        assert page.complaints() == [], page.complaints()
    print("the page is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
