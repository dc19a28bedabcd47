"""An engine is emptied over HTTP while its streams go on at another one."""

from __future__ import annotations

import json

import pytest
from control_case import call, serving_with_control, wait_for
from coordinator_case import replica
from engines import make_engine

from megatron_infer.testing.tiny import tiny_gpt


@pytest.fixture(scope="module")
def case():
    model = tiny_gpt(seed=1, vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    sizes = {"buffer_size_gb": 0.02, "max_sequence_length": 256, "max_requests": 8}
    with serving_with_control(*(make_engine(model, **sizes) for _ in range(2))) as one:
        yield one


def running(case) -> dict[str, int]:
    return {replica["name"]: replica["running"] for replica in case.coordinator.core.stats()["replicas"]}


def test_streams_go_on_while_an_engine_is_emptied(case):
    body = {"prompt": [5, 9, 30, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    whole = case.http.post("/v1/completions", json=body | {"stream": False, "return_token_ids": True}).json()
    want = whole["choices"][0]["token_ids"]
    first, second = running(case)
    call(case, f"/v1/replicas/{second}/drain")
    tokens, is_told = [], False
    with case.http.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
            if 3 < len(tokens) < 100 and not is_told:
                assert not call(case, f"/v1/replicas/{second}/undrain")["draining"]
                is_told = call(case, f"/v1/replicas/{first}/drain?move=true")["draining"]
    assert tokens == want
    stats = case.coordinator.core.stats()
    assert stats["moved"] == 1 and not stats["resent"]
    wait_for(lambda: not running(case)[first])
    call(case, f"/v1/replicas/{first}/undrain")
    assert "megatron_infer_coordinator_moved_total 1" in case.http.get("/metrics").text


def test_an_engine_that_takes_no_commands_is_not_emptied(case):
    with replica(case.coordinator.address, name="plain", key=case.coordinator.key, control=False):
        wait_for(lambda: "plain" in running(case))
        assert "--control" in call(case, "/v1/replicas/plain/drain", expected=403)["error"]["message"]


def test_a_name_that_no_engine_has_and_a_parameter_that_is_none_are_refused(case):
    assert "there are: " in call(case, "/v1/replicas/replica7/drain", expected=404)["error"]["message"]
    call(case, "/v1/replicas/x/drain?moves=true", expected=400)
    call(case, "/v1/replicas/x/drain?move=perhaps", expected=400)
