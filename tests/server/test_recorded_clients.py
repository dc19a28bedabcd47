"""Calls of training loops, as their sources make them, are answered with the fields that these read; turns of coding
agents, recorded from their programs, are answered in their own forms."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from client_server import served_tiny
from scripted import ScriptedEngine
from server_case import serving, tokenizer
from test_responses import TEMPLATE

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "clients")]

import client_check  # noqa: E402

LOAD_TOOLS = str(Path(sys.prefix) / "load" / "bin" / "python")
"""What `make load-tools` makes."""

RECORDED = json.loads((Path(__file__).parent / "recorded_calls.json").read_text())
TURNS = json.loads((Path(__file__).parent / "recorded_turns.json").read_text())
"""Bodies without the texts and the ids of their sessions, and with some of their tools."""


def found(reply, path):
    for part in path.split("."):
        reply = reply[int(part)] if part.isdigit() else reply[part]
    return reply


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with served_tiny(tmp_path_factory.mktemp("weights")) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("recorded", RECORDED, ids=[one["client"] for one in RECORDED])
def test_calls_of_a_training_loop_are_answered_with_what_it_reads(http, recorded):
    for call in recorded["calls"]:
        reply = http.request(call.get("method", "POST"), call["path"], json=call.get("body"))
        assert reply.status_code == call.get("status", 200), (call, reply.text)
        for path in call["reads"]:
            assert found(reply.json(), path) is not None, (call, path)


@pytest.mark.parametrize("recorded", TURNS, ids=[one["client"] for one in TURNS])
def test_turns_of_a_coding_agent_are_answered_as_it_asked(recorded):
    """With a text and with a call of one of its tools, in its events; what has no effect is listed."""
    engine = ScriptedEngine()
    with serving(engine, encoder=tokenizer(TEMPLATE), reasoning_parser="qwen3") as case:
        for call in recorded["calls"]:
            tools = call["body"]["tools"]
            names = [tool["name"] for tool in tools if tool.get("type") in (None, "function")]

            def last(script, call=call, **other):
                """The call's header, and the content blocks or output items of its stream."""
                engine.set_script(script, 7)
                with case.http.stream("POST", call["path"], json={**call["body"], **other}) as reply:
                    lines = list(reply.iter_lines())
                assert reply.status_code == 200, (call["call"], lines)
                events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
                items = [event.get("item") or event.get("content_block") for event in events]
                return reply.headers["x-ignored-fields"].split(", "), [item for item in items if item], events

            ignored, _, events = last("Hello there.")
            deltas = [event.get("delta") for event in events if event["type"].endswith("delta")]
            texts = [delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas]
            assert "".join(texts) == "Hello there."
            others = {f"tools[{place}]" for place, tool in enumerate(tools) if tool.get("name") not in names}
            listed = (
                {"context_management", "output_config.effort"} if "messages" in call["body"] else {"client_metadata"}
            )
            assert others | listed <= set(ignored), ignored
            written = json.dumps({"name": names[0], "arguments": {}})
            _, items, _ = last(f"<tool_call>\n{written}\n</tool_call>")
            assert {item["name"] for item in items} == {names[0]}
            last("", tool_choice={"type": "any"} if "messages" in call["body"] else "required")
            assert names[-1] in engine.params[0].structured.grammar, "every schema can be held"


def test_old_trls_routes_say_what_openais_say(http):
    """Tokens, log probabilities and scores in both forms; n, a regex, and parameters that go before others."""
    ids, seed = [[5, 6, 7], [9, 10]], {"seed": 11}
    own = http.post(
        "/generate/", json={"prompts": ids, "n": 2, "max_tokens": 5, "logprobs": 1, "generation_kwargs": seed}
    )
    theirs = http.post(
        "/v1/completions", json={"prompt": ids, "n": 2, "max_tokens": 5, "return_token_ids": True, **seed}
    )
    assert own.json()["prompt_ids"] == ids
    assert own.json()["completion_ids"] == [one["token_ids"] for one in theirs.json()["choices"]]
    for tokens, names, values in zip(
        *(own.json()[name] for name in ("completion_ids", "logprob_token_ids", "logprobs")), strict=True
    ):
        assert all(token in row for token, row in zip(tokens, names, strict=True))
        assert all(row == sorted(row, reverse=True) and len(row) in (1, 2) for row in values)
    body = {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 40, "structured_outputs_regex": "[ab]{3}"}
    (drawn,) = http.post("/chat/", json=body).json()["completion_ids"]
    assert {chr(token) for token in drawn[:3]} <= {"a", "b"} and len(drawn) in (3, 4)

    body = {"sequences": [[5, 6, 7, 8], [9, 10]], "prompt_lengths": [1, 1], "top_logprobs": 3}
    plain = http.post("/get_sequence_logprobs/", json=body).json()
    packed = http.post("/get_sequence_logprobs/", json={**body, "response_format": "binary"}).json()
    assert packed["shape"] == [2, 3, 3] and packed["completion_lengths"] == [3, 1]
    top, own_values = (
        np.frombuffer(base64.b64decode(packed[name]), np.float32).reshape(2, 3, -1)
        for name in ("logprobs_b64", "actual_logprobs_b64")
    )
    top_ids = np.frombuffer(base64.b64decode(packed["token_ids_b64"]), np.int32).reshape(2, 3, 3)
    scored = http.post("/v1/completions", json={"prompt": [5, 6, 7, 8], "echo": True, "logprobs": 0, "max_tokens": 0})
    assert own_values[0, :, 0].tolist() == pytest.approx(scored.json()["choices"][0]["logprobs"]["token_logprobs"][1:])
    assert np.isneginf(top[1, 1:]).all() and np.isneginf(own_values[1, 1:]).all()
    for place, count in ((0, 3), (1, 1)):
        for at in range(count):
            assert top[place, at].tolist() == pytest.approx(plain["logprobs"][place][at][:3])
            assert top_ids[place, at].tolist() == plain["logprob_token_ids"][place][at][:3]


@pytest.mark.long
@pytest.mark.parametrize("script", client_check.SCRIPTS)
def test_scripts_of_installed_clients_run(http, script):
    """docs/clients.md has what came of all of them."""
    interpreters = [one for one in (sys.executable, LOAD_TOOLS) if Path(one).exists()]
    row = client_check.run(script, str(http.base_url).rstrip("/"), "next", interpreters)
    if row["result"] == "not installed":
        pytest.skip(f"not installed: {row['client']}")
    assert row["result"] == "passed"
