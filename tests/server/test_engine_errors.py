"""A request that the engine fails is an error of its call on every route: a status, or an error event that ends a
stream without [DONE]; never a reply that looks whole."""

from __future__ import annotations

import json

import openai
import pytest
from control_case import serving_with_control
from echo import EchoEngine
from server_case import client_of, events, post, tokenizer

from megatron_infer.coordinator.protocol import ReplicaLost
from megatron_infer.engine.executor import FailedStep
from megatron_infer.errors import LockstepError, RankFailure
from megatron_infer.server.http_errors import api_error_of

DOOMED = 66
"""A prompt that begins with it fails at its third token, or with AT_ONCE behind it at its first."""
AT_ONCE = 99


class FailingEngine(EchoEngine):
    def step(self):
        outputs = super().step()
        for output in outputs:
            prompt, request = output.prompt_token_ids, self._requests.get(output.request_id)
            num_drawn = 3 if request is None or AT_ONCE in prompt else len(request.sequences[0].tokens) - len(prompt)
            if prompt[0] == DOOMED and num_drawn >= 3:
                if request is not None:
                    self.abort(output.request_id)
                output.finished, output.error = True, FailedStep("the forward of step 7 raised ValueError: broken")
                for one in output.outputs:
                    one.finish_reason = "error"
        return outputs


@pytest.fixture(scope="module")
def case():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving_with_control(FailingEngine(step_s=0.05), encoder=tokenizer(template)) as case:
        assert case.http.post("/tokenize", json={"prompt": "Boo"}).json()["tokens"][0] == DOOMED
        yield case


ROUTES = {
    "completions": ("/v1/completions", {"prompt": [DOOMED, 2]}),
    "completions, n": ("/v1/completions", {"prompt": [DOOMED, 2], "n": 3}),
    "completions, one of several prompts": ("/v1/completions", {"prompt": [[1, 2], [DOOMED, 2], [4]]}),
    "completions, best_of": ("/v1/completions", {"prompt": [DOOMED, 2], "best_of": 2}),
    "sglang": ("/generate", {"input_ids": [DOOMED, 2]}),
    "sglang, batch": ("/generate", {"input_ids": [[1], [DOOMED, 2]]}),
    "vllm": ("/inference/v1/generate", {"token_ids": [DOOMED, 2]}),
    "embeddings": ("/v1/embeddings", {"input": [[1, 2], [DOOMED]]}),
}
STREAMED = ["completions", "completions, n", "completions, one of several prompts", "sglang", "vllm"]


def assert_error(body):
    assert body["error"]["message"] == "the forward of step 7 raised ValueError: broken"
    assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "engine_error")


@pytest.mark.parametrize(
    "error", [RankFailure(1, "a step", "it died"), LockstepError("ranks differ"), ReplicaLost("gone")]
)
def test_engine_that_goes_on_no_more_is_a_503_and_not_the_callers_fault(error):
    found = api_error_of(error)
    assert (found.status, found.code) == (503, "engine_unavailable") and str(error) in found.message


@pytest.mark.parametrize("route", ROUTES)
def test_a_reply_has_an_error_status(case, route):
    path, body = ROUTES[route]
    reply = post(case, path, **body)
    assert reply.status_code == 500
    assert_error(reply.json())


@pytest.mark.parametrize("route", STREAMED)
def test_a_stream_that_has_begun_ends_with_the_error_and_without_done(case, route):
    path, body = ROUTES[route]
    with case.http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert "[DONE]" not in lines and len(lines) > 1
    assert_error(json.loads(lines[-1]))
    assert '"finish_reason":"error"' not in "".join(lines)


def test_a_stream_of_which_nothing_was_sent_has_an_error_status(case):
    reply = post(case, "/v1/completions", prompt=[DOOMED, AT_ONCE], stream=True)
    assert reply.status_code == 500
    assert_error(reply.json())


def test_openai_clients_raise_and_other_calls_go_on(case):
    client = client_of(case)
    with pytest.raises(openai.InternalServerError, match="broken"):
        client.completions.create(model="tiny", prompt=[DOOMED, 2])
    with pytest.raises(openai.APIError, match="broken"):
        list(client.completions.create(model="tiny", prompt=[DOOMED, 2], stream=True))
    assert len(client.completions.create(model="tiny", prompt=[1, 2], max_tokens=6).choices[0].text.split()) == 6
    with case.http.stream("POST", "/v1/completions", json={"prompt": [1, 2], "max_tokens": 4, "stream": True}) as reply:
        assert events(list(reply.iter_lines()))[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_chat_raises_too(case, streams):
    client = client_of(case)
    with pytest.raises(openai.APIError, match="broken"):
        messages = [{"role": "user", "content": "Boo"}]
        list(client.chat.completions.create(model="tiny", messages=messages, n=2, stream=streams))
