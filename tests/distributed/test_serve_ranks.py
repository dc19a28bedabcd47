"""`serve` under torchrun: replicas of two ranks each; the first rank brings coordinator and HTTP."""

from __future__ import annotations

import os

import httpx
import pytest
import small_model
from test_command import ROOT, Command, wait_for

pytestmark = pytest.mark.skipif(
    not small_model.installed(), reason="make installs the model that the small one is made of"
)
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@pytest.mark.long
@pytest.mark.timeout(280)
def test_two_replicas_serve_behind_one_port_and_prompts_go_where_their_prefix_is(tmp_path):
    small_model.write_package(tmp_path)
    policy = ("--prefix-caching-coordinator-policy", "longest_prefix")
    engine = ("--dtype", "float32", "--max-sequence-length", "512", "--buffer-size-gb", "0.2")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    layout = ("--dp", "2", "--tp", "2", "--http-workers", "2", "--show-cached-tokens")
    command = Command("smollm2", *layout, *policy, *engine, launcher=LAUNCHER, path=path)
    try:
        url = command.wait_ready()
        wait_for(lambda: len(httpx.get(f"{url}/health").json()["replicas"]) == 2)
        shared = {i: f"Chapter {i}. " + "The same long beginning. " * 20 for i in range(4)}
        texts: dict[int, set[str]] = {i: set() for i in shared}
        cached = 0
        for _ in range(2):
            for i, prompt in shared.items():
                ask = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
                reply = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()
                texts[i].add(reply["choices"][0]["text"])
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert all(len(found) == 1 for found in texts.values()) and cached >= 64
        assert [one["name"] for one in httpx.get(f"{url}/health").json()["workers"]] == ["http0", "http1"]
        assert command.matches("routing by longest_prefix") and len(command.matches("replica replica[01] joined")) == 2
    finally:
        command.end()
    assert "RankFailure" not in "".join(command.lines) and command.matches("shutting down: 0 calls")
