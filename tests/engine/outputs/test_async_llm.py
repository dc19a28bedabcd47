"""AsyncLLM: streams of many coroutines over one engine; leaving early aborts; errors reach their caller only."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from engines import make_engine

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.async_llm import AsyncLLM, EngineStopped, EngineThread
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InvalidPrompt

PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(model) -> DynamicInferenceEngine:
    return make_engine(model, max_sequence_length=128, max_requests=8)


def make_async(engine: DynamicInferenceEngine) -> AsyncLLM:
    """AsyncLLM over an engine that exists."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.llm, llm.tokenizer = SimpleNamespace(engine=engine), None  # type: ignore[assignment]
    llm._thread = EngineThread(engine)
    return llm


async def collect(llm: AsyncLLM, prompt: list[int], **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids async for output in llm.generate(prompt, PARAMS, **options)]


def test_concurrent_streams_equal_one_at_a_time(engine):
    prompts = [list(range(i + 4, i + 20)) for i in range(6)]
    expected = [engine.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]

    async def main() -> None:
        async with make_async(engine) as llm:
            streams = await asyncio.gather(*(collect(llm, prompt) for prompt in prompts))
            assert [stream[-1] for stream in streams] == expected
            assert all(len(stream) == 10 for stream in streams)
            deltas = await collect(llm, prompts[0], stream="delta")
            assert sum(deltas, []) == expected[0]
            assert await collect(llm, prompts[0], stream="final") == [expected[0]]

    asyncio.run(main())


def test_the_engines_thread_takes_the_engines_device(engine, monkeypatch):
    """A thread begins with the first GPU, to which kernels of another one's tensors would go."""
    names: list[str] = []
    monkeypatch.setattr(engine.device, "make_current", lambda: names.append(threading.current_thread().name))
    thread = EngineThread(engine)
    assert thread.call(lambda: list(names)).result(10) == ["megatron-infer-engine"]
    thread.stop()


def test_leaving_the_loop_aborts_and_a_bad_prompt_raises_where_it_was_asked(engine):
    async def main() -> None:
        async with make_async(engine) as llm:
            other = asyncio.create_task(collect(llm, [9, 8, 7]))
            with pytest.raises(InvalidPrompt):
                await collect(llm, [])
            async for _ in llm.generate([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True), request_id="left"):
                break
            assert len((await other)[-1]) == 10
            for _ in range(200):
                if not len(engine.output_processor):
                    break
                await asyncio.sleep(0.01)
            assert not len(engine.output_processor)

    asyncio.run(main())


def test_abort_ends_the_stream_with_the_partial(engine):
    async def main() -> None:
        async with make_async(engine) as llm:
            stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True), request_id="x")
            await anext(stream)
            partial = await llm.abort("x")
            last = [output async for output in stream][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
            assert last.outputs[0].token_ids == partial.outputs[0].token_ids

    asyncio.run(main())


def test_a_dead_engine_reaches_every_waiter(engine, monkeypatch):
    async def main() -> None:
        llm = make_async(engine)
        monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(SystemError("gone")))
        with pytest.raises(EngineStopped) as caught:
            await collect(llm, [1, 2, 3])
        assert isinstance(caught.value.__cause__, SystemError)
        with pytest.raises(EngineStopped):
            await collect(llm, [1, 2, 3])
        monkeypatch.undo()
        for state in engine.output_processor.requests:
            engine.abort(state.id)

    asyncio.run(main())
