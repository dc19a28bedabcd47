"""The page in a real browser: a chat that grows as tokens arrive, the key, the buttons."""

from __future__ import annotations

import time

import pytest
from browser_case import browser, missing, wait_until
from echo import EchoEngine
from scripted import ScriptedEngine
from server_case import serving, tokenizer
from test_status_page import KEY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]


def test_chat_grows_while_tokens_arrive_and_control_buttons_are_off_without_control(tmp_path):
    with serving(EchoEngine(step_s=0.03)) as case, browser(tmp_path) as page:
        page.open(case.url)
        wait_until(lambda: page.text("#state") == "ok")
        assert page.shown("#controls button") == [] and page.shown("#key-form") == []
        page.run("document.getElementById('max-tokens').value = 200")
        page.type("#text", "Hello\ue007")  # Enter
        lengths = []
        wait_until(lambda: page.shown("#stop") == ["Stop"])
        while page.shown("#stop"):
            lengths.append(len(page.text(".turn.assistant .text")))
            time.sleep(0.1)
        assert len(set(lengths)) >= 4 and lengths == sorted(lengths), lengths
        assert "200 tokens" in page.text(".turn.assistant .who")
        assert len(page.text(".turn.assistant .text").split()) == 200
        wait_until(lambda: "cached" in page.text("#replicas"))
        page.type("#text", "And again\ue007")
        wait_until(lambda: page.shown("#stop") == ["Stop"])
        page.click("#stop")
        wait_until(lambda: page.shown("#stop") == [])
        assert "stopped" in page.run("return [...document.querySelectorAll('.turn.assistant .who')].pop().innerText")
        wait_until(lambda: case.engines[0].stats()["num_requests"] == 0)
        assert page.complaints() == []


def test_reasoning_is_shown_apart_from_the_answer_and_is_text(tmp_path):
    engine = ScriptedEngine(step_s=0.01)
    engine.set_script("<think>\nTwo & <b>two</b>\n\nare four.\n</think>\n\n**Four.**", stride=3)
    with serving(engine, encoder=tokenizer(), reasoning_parser="qwen3") as case, browser(tmp_path) as page:
        page.open(case.url)
        wait_until(lambda: page.text("#state") == "ok")
        page.type("#text", "Two and two?\ue007")
        wait_until(lambda: "tokens" in page.text(".turn.assistant .who"))
        assert page.text(".turn.assistant .text") == "Four."
        assert page.text(".turn.assistant summary") == "Reasoning"
        assert page.run("return document.querySelector('.thought').textContent") == "Two & <b>two</b>\n\nare four."
        assert page.run("return document.querySelector('.thoughts').open") is False
        page.click(".thoughts summary")
        assert page.run("return document.querySelector('.thoughts').open") is True
        page.type("#text", "Why?\ue007")
        wait_until(lambda: len(engine.prompts) == 2)
        sent = tokenizer().decode(engine.prompts[1])
        assert "**Four.**" in sent and "are four" not in sent
        assert page.complaints() == []


def test_key_is_prompted_and_kept_in_memory_and_buttons_show_what_is_served(tmp_path):
    with serving(api_key=KEY, control=True) as case, browser(tmp_path) as page:
        page.open(case.url)
        wait_until(lambda: page.shown("#key-form"))
        assert page.run("return document.activeElement.id") == "key" and page.shown("#controls button") == []
        page.type("#key", "wrong\ue007")
        wait_until(lambda: page.text("#key-note") == "That is not the key.")
        page.type("#key", KEY + "\ue007")
        wait_until(lambda: page.text("#state") == "ok")
        assert page.shown("#key-form") == []
        wait_until(lambda: page.shown("#controls button") == ["Pause", "Go on", "Suspend", "Resume"])
        fits = "return [...document.querySelectorAll('#controls button')].map(one => !one.disabled)"
        wait_until(lambda: page.run(fits) == [True, False, True, False])
        page.click("[data-path='/pause']")
        wait_until(lambda: page.text("#state") == "paused" and page.text("#control-note") == "Pause: done")
        wait_until(lambda: page.run(fits) == [False, True, True, False])
        page.click("[data-path='/resume']")
        wait_until(lambda: page.text("#state") == "ok")
        places = "localStorage, sessionStorage, document.cookie, location.href, document.getElementById('key').value"
        kept = page.run(f"return JSON.stringify([{places}])")
        assert KEY not in kept
