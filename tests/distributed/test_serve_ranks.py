"""`serve` under torchrun: replicas of two ranks each; the first rank brings coordinator and HTTP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import small_model
from hf_models import random_model
from test_command import ROOT, Command, wait_for

pytestmark = pytest.mark.skipif(
    not small_model.installed(), reason="make installs the model that the small one is made of"
)
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@contextlib.contextmanager
def served(folder: Path, *layout: str) -> Iterator[tuple[Command, str]]:
    """(the command, its URL): two engines of two ranks each."""
    small_model.write_package(folder)
    engine = ("--dtype", "float32", "--max-sequence-length", "512", "--buffer-size-gb", "0.2")
    path = os.pathsep.join((str(folder), str(ROOT)))
    command = Command("smollm2", *layout, *engine, launcher=LAUNCHER, path=path)
    try:
        url = command.wait_ready()
        wait_for(lambda: len(httpx.get(f"{url}/health").json()["replicas"]) == 2)
        yield command, url
    finally:
        command.end()
    assert "RankFailure" not in "".join(command.lines) and command.matches("shutting down: 0 calls")


def answers(url: str) -> tuple[dict[int, str], int]:
    """(texts of four long prompts, how many tokens of the last were cached)."""
    texts, cached = {}, 0
    for i in range(4):
        prompt = f"Chapter {i}. " + "The same long beginning. " * 30
        reply = httpx.post(
            f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0}, timeout=60
        )
        texts[i] = reply.json()["choices"][0]["text"]
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return texts, cached


@pytest.mark.long
@pytest.mark.timeout(280)
def test_two_replicas_serve_behind_one_port_and_prompts_go_where_their_prefix_is(tmp_path):
    policy = ("--prefix-caching-coordinator-policy", "longest_prefix")
    layout = ("--dp", "2", "--tp", "2", "--http-workers", "2", "--show-cached-tokens")
    with served(tmp_path, *layout, *policy) as (command, url):
        first, _ = answers(url)
        second, cached = answers(url)
        assert first == second and cached >= 64
        assert [one["name"] for one in httpx.get(f"{url}/health").json()["workers"]] == ["http0", "http1"]
        assert command.matches("routing by longest_prefix") and len(command.matches("replica replica[01] joined")) == 2


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ranks_of_one_engine_compute_prompts_and_those_of_another_go_on(tmp_path):
    """What the decode engine computes itself, of a prompt that it has in its cache, is the same."""
    with served(tmp_path, "--tp", "2", "--prefill", "1", "--decode", "1", "--show-cached-tokens") as (_, url):
        roles = [one["role"] for one in httpx.get(f"{url}/health").json()["replicas"]]
        assert sorted(roles) == ["decode_only", "prefill_only"]
        moved = "megatron_infer_coordinator_moved_total 4.0"
        first, cached = answers(url)
        wait_for(lambda: moved in httpx.get(f"{url}/metrics").text)
        second, again = answers(url)
        assert first == second and not cached and again >= 64
        assert moved in httpx.get(f"{url}/metrics").text


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("size", "layout"), [("2", ("--ep", "2")), ("4", ("--tp", "2", "--ep", "2"))])
def test_expert_parallel_ranks_with_own_requests_serve_behind_one_port(tmp_path, size, layout):
    """The tokens of a server of one rank, before and after a pause of both."""
    random_model("qwen3_moe").save_pretrained(tmp_path / "moe")
    engine = ("--dtype", "float32", "--max-sequence-length", "128", "--buffer-size-gb", "0.05", "--control")
    launcher, own = (*LAUNCHER[:-1], size), (*layout, "--dp-attention", "true")
    found = []
    for arguments, how in (((), {}), (own, {"launcher": launcher})):
        command = Command(str(tmp_path / "moe"), *engine, *arguments, **how)
        try:
            url = command.wait_ready()
            wait_for(
                lambda url=url, count=1 + bool(arguments): len(httpx.get(f"{url}/health").json()["replicas"]) == count
            )
            tokens = [tokens_of(url, number) for number in range(4)]
            for control in ("pause", "resume"):
                assert httpx.post(f"{url}/{control}", timeout=60).status_code == 200
            found.append([*tokens, tokens_of(url, 4)])
        finally:
            command.end()
        assert "RankFailure" not in "".join(command.lines)
    assert found[0] == found[1]


def tokens_of(url, number):
    ask = {"prompt": [5 + number, 6, 7, 8], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=ask | {"ignore_eos": True}, timeout=60).json()
    return reply["choices"][0]["token_ids"]
