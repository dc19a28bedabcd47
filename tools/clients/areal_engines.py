"""AReaL's remote engines, SGLang's and vLLM's dialect: rollouts, teacher scores, pause, weights from disk, continue."""

import asyncio

import requests
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.engine.sglang_remote import SGLangBackend
from areal.engine.vllm_remote import VLLMBackend
from areal.infra import RemoteInfEngine, workflow_context

RAN = "`agenerate`, scores, pause, weights from disk, continue; by `SGLangBackend` and `VLLMBackend`"


class Meta:
    """The part of AReaL's WeightUpdateMeta that an update from files reads."""

    use_lora = False

    def __init__(self, path: str) -> None:
        self.path = path


async def rollout(engine: RemoteInfEngine) -> None:
    settings = GenerationHyperparameters(max_new_tokens=8, greedy=True)
    reply = await engine.agenerate(ModelRequest(input_ids=[1, 2, 3], gconfig=settings))
    assert 1 <= len(reply.output_tokens) <= 8 and len(reply.output_logprobs) == len(reply.output_tokens)
    assert all(value <= 0 for value in reply.output_logprobs)


def post(url: str, request: object) -> dict:
    reply = requests.request(request.method, url + request.endpoint, json=request.payload, timeout=60)
    reply.raise_for_status()
    return reply.json()


async def run(url: str, weights: str) -> None:
    for backend in (SGLangBackend(), VLLMBackend()):
        engine = RemoteInfEngine(InferenceEngineConfig(experiment_name="e", trial_name="t"), backend)
        engine.addresses = [url.removeprefix("http://")]
        engine.lora_initialized = False
        engine._version = 0
        engine._workflow_executor = type("Executor", (), {"is_paused": staticmethod(lambda: False)})()
        await rollout(engine)
        scores = backend.parse_score_response(post(url, backend.build_score_request([1, 2, 3, 4], 2, False, 0)), 2)
        assert len(scores) == 2 and all(score <= 0 for score in scores)
        post(url, backend.get_pause_request())
        for request in backend.build_disk_weight_update_requests(Meta(weights)).requests:
            assert post(url, request)["success"]
        post(url, backend.get_resume_request())
        await rollout(engine)
    await (await workflow_context.get_aiohttp_session()).close()


def main(url: str, weights: str) -> None:
    asyncio.run(run(url, weights))
