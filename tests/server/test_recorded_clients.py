"""Calls of training loops, as their sources make them, are answered with the fields that these read."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import httpx
import pytest
from client_server import served_tiny

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "clients")]

import client_check  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "recorded_calls.json").read_text())


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


@pytest.mark.long
@pytest.mark.parametrize("script", client_check.SCRIPTS)
def test_scripts_of_installed_clients_run(http, script):
    """docs/clients.md has what came of all of them."""
    package = client_check.SCRIPTS[script]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"not installed: {package}")
    url = str(http.base_url).rstrip("/")
    arguments = [url, "next"] if package == "areal" else [url]
    assert importlib.import_module(script).main(*arguments)["client"]
