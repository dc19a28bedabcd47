"""megatron_infer.mcore: the calls of megatron-core's scripts are taken, and give what the engine itself gives."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
import urllib.request

import pytest
import torch
from megatron.core.inference.engines import dynamic_engine
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError, NotLeader, RequestError, WrongState
from megatron_infer.mcore import client, engine, http
from megatron_infer.mcore.context import DynamicInferenceContext, GPTInferenceWrapper, TextGenerationController
from megatron_infer.testing.tiny import tiny_gpt

PROMPTS = ["1 2 3", "4 5", "9 8 7 6"]
IDS = [[int(word) for word in prompt.split()] for prompt in PROMPTS]
CONFIG = {"buffer_size_gb": 0.02, "max_sequence_length": 64, "block_size_tokens": 16}
# release -> parameters after self, as that release declares them
RECORDED = {
    DynamicInferenceContext: {"0.19": "model_config, inference_config"},
    GPTInferenceWrapper: {
        "0.16": "model, inference_wrapper_config, inference_context=None, pg_collection=None",
        "0.19": "model, inference_context=None",
    },
    TextGenerationController: {
        "0.16": "inference_wrapped_model, tokenizer, pp_group=None",
        "0.19": "inference_wrapped_model, tokenizer",
    },
    engine.DynamicInferenceEngine: {
        "0.16": "controller, context, enable_cuda_graph=None, random_seed=None, *, track_paused_request_events=False, "
        "enable_chunked_prefill=True, inference_logging_step_interval=0, pg_collection=None",
        "0.19": "controller, context",
    },
    engine.DynamicInferenceEngine.add_request: {
        "0.16": "request_id, prompt, sampling_params=None",
        "0.20-dev": "request_id, prompt, sampling_params=None, precomputed_block_hashes=None, *, imgs=None, "
        "num_tiles=None, num_img_embeddings_per_tile=0, imgs_sizes=None",
    },
    engine.DynamicInferenceEngine.generate: {"0.16": "prompts, sampling_params=None"},
    engine.DynamicInferenceEngine.run_engine: {"0.16": "*, loop=None"},
    engine.DynamicInferenceEngine.wait_until: {"0.19": "state"},
    engine.DynamicInferenceEngine.start_listening_to_data_parallel_coordinator: {
        "0.16": "inference_coordinator_port=None, launch_inference_coordinator=True, *, loop=None",
        "0.19": "inference_coordinator_port=None, launch_inference_coordinator=True, *, hostname=None, "
        "coordinator_schedule_output_path=None, loop=None",
    },
    client.InferenceClient: {
        "0.16": "inference_coordinator_address",
        "0.19": "inference_coordinator_address, deserialize=False",
    },
    client.InferenceClient.start: {"0.16": "loop=None", "0.20-dev": "loop=None, connect_timeout_seconds=None"},
    client.InferenceClient.add_request: {
        "0.16": "prompt, sampling_params",
        "0.20-dev": "prompt, sampling_params, *, multi_modal_data=None",
    },
    client.InferenceClient.abort_request: {"0.20-dev": "request_id"},
    client.InferenceClient.set_generation_epoch: {"0.19": "generation_epoch"},
    http.start_text_gen_server: {
        "0.19": "coordinator_addr, tokenizer, rank, server_port, parsers=None, verbose=False, num_replicas=4, "
        "hostname=None",
        "0.20-dev": "coordinator_addr, tokenizer, rank, server_port, parsers=None, verbose=False, num_replicas=4, "
        "hostname=None, sock=None, chat_template=None",
    },
}


class NullTokenizer:
    """As megatron-core's: a text is the numbers of its tokens."""

    eod = 127

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split(" ")]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def chain(model: torch.nn.Module, config: object = None, **keywords: object) -> engine.DynamicInferenceEngine:
    context = DynamicInferenceContext(model.config, config, **({} if config else CONFIG | keywords))
    controller = TextGenerationController(GPTInferenceWrapper(model, context), NullTokenizer())
    return engine.DynamicInferenceEngine(controller, context)


def greedy(**given: object) -> MegatronParams:
    params = MegatronParams(top_k=1, num_tokens_to_generate=8, return_log_probs=True, **given)
    params.add_attributes({"skip_prompt_log_probs": True, "termination_id": -1})
    return params


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    own = DynamicInferenceEngine(tiny_gpt(init_method_std=0.5), InferenceConfig(**CONFIG))
    outputs = own.generate(IDS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("call", "release"), [(call, release) for call, releases in RECORDED.items() for release in releases]
)
def test_each_releases_parameters_are_taken_in_order_and_by_name(call, release):
    theirs = inspect.signature(eval(f"lambda {RECORDED[call][release]}: None")).parameters.values()
    by_place = [one for one in theirs if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {one.name: one.default for one in theirs if one not in by_place}
    ours = inspect.signature(call)
    own = () if inspect.isclass(call) or "self" not in ours.parameters else (None,)
    ours.bind(*own, *(None for _ in by_place), **named)
    ours.bind(*own, **{one.name: None for one in theirs})


def test_the_chain_generates_what_the_engine_itself_generates(expected):
    ours = chain(tiny_gpt(init_method_std=0.5))
    records = ours.generate(PROMPTS, greedy())
    results = [record.merge() for record in records]
    assert [one.generated_tokens for one in results] == expected
    assert [one.generated_text for one in results] == [" ".join(map(str, tokens)) for tokens in expected]
    assert [one.prompt for one in results] == PROMPTS and all(one.succeeded() for one in results)
    assert all(len(one.generated_log_probs) == 8 and max(one.generated_log_probs) < 0 for one in results)
    assert ours.context.step_count == 8 and ours.context.lifetime_prefill_token_count == sum(map(len, IDS))
    assert ours.context.max_requests > 0 and ours.context.kv_block_allocator.pool_size > 0


def test_steps_suspends_and_futures_of_a_script(expected):
    ours = chain(tiny_gpt(init_method_std=0.5), kv_cache_management_mode="recompute")
    ours.resume()  # of an engine that runs
    futures = [ours.add_request(number, ids, greedy()) for number, ids in enumerate(IDS)]
    finished = {}
    for step in range(20):
        result = ours.step_modern()
        finished |= {record.request_id: record for record in result["finished_request_records"]}
        assert set(result) == {
            "active_request_ids",
            "finished_request_records",
            "step_time",
            "cuda_graph_request_count",
        }
        assert sorted([*finished, *result["active_request_ids"]]) == [0, 1, 2]
        if step == 3:
            ours.suspend()
            with pytest.raises(dynamic_engine.EngineSuspendedError):
                ours.step_modern()
            ours.resume()
        if not ours.has_unfinished_requests():
            break
    assert [finished[number].merge().generated_tokens for number in range(3)] == expected
    assert [future.result() for future in futures] == [finished[number] for number in range(3)]
    left = ours.add_request(7, IDS[0], greedy())
    ours.reset()
    assert left.cancelled() and not ours.has_unfinished_requests()
    assert [one.merge().generated_tokens for one in ours.generate(PROMPTS, greedy())] == expected


def test_what_cannot_be_kept_is_refused_by_name():
    model = tiny_gpt()
    with pytest.raises(ConfigError, match="no_such_option"):
        chain(model, no_such_option=3)
    with pytest.raises(ConfigError, match="image_preprocessing_config"):
        chain(model, image_preprocessing_config=object())
    ours = chain(model)
    with pytest.raises(RequestError, match="imgs"):
        ours.add_request(0, IDS[0], greedy(), imgs=torch.ones(1))
    with pytest.raises(RequestError, match="add_BOS"):
        ours.add_request(0, "1 2", greedy(add_BOS=True))
    ours.add_request(0, IDS[0], greedy())
    with pytest.raises(RequestError, match="request 0 is unfinished"):
        ours.add_request(0, IDS[1], greedy())
    with pytest.raises(AttributeError, match="has no 'setup_kv_transfer'; docs/megatron_calls"):
        ours.setup_kv_transfer("prefill")
    with pytest.raises(ConfigError, match="parser 'xml' is not known here; known are deepseek-r1-reasoning"):
        http.start_text_gen_server("tcp://127.0.0.1:1", NullTokenizer(), 0, 0, parsers=["xml"])


def test_options_without_meaning_here_are_named_in_a_warning():
    with pytest.warns(ConfigWarning, match="use_synchronous_zmq_collectives=True has no effect: the ranks"):
        chain(tiny_gpt(), use_synchronous_zmq_collectives=True)


@pytest.mark.long
def test_clients_of_a_coordinator_are_answered_and_states_are_reached(expected):
    """Requests, HTTP, ledger, epochs, suspend, resume and the end, in one job of one rank."""
    ours = chain(tiny_gpt(init_method_std=0.5))
    state = engine.States

    async def job() -> None:
        address = await ours.start_listening_to_data_parallel_coordinator()
        with pytest.raises(WrongState, match="listens to"):
            await ours.start_listening_to_data_parallel_coordinator()
        one = client.InferenceClient(address, deserialize=True)
        one.start()
        ours.local_metadata_ledger_enabled = True
        one.set_generation_epoch(3)
        results = await asyncio.gather(*(one.add_request(prompt, greedy()) for prompt in (PROMPTS[0], *IDS[1:])))
        assert [result.generated_tokens for result in results] == expected
        assert results[0].prompt == PROMPTS[0] and results[0].generated_text == " ".join(map(str, expected[0]))
        http.start_text_gen_server(address, NullTokenizer(), 0, 0)
        host, port = http._running._listening.getsockname()
        assert host == "127.0.0.1", "without a host it is for this machine alone"
        reply = await asyncio.to_thread(ask, port)
        assert reply["choices"][0]["text"].split() == [str(token) for token in expected[0]]
        assert set(ours.local_metadata_ledger) >= {reply["id"]} and len(ours.local_metadata_ledger) == 4
        assert {record.num_evictions for record in ours.local_metadata_ledger.values()} == {0}
        waiting = one.add_request(IDS[0], greedy())
        one.pause_engines()
        await ours.wait_until(state.PAUSED)
        one.suspend_engines()
        await ours.wait_until(state.SUSPENDED)
        one.pause_engines()  # changes nothing
        await asyncio.sleep(0.1)
        assert ours.inner.state.value == "suspended" and not ours._state_events[state.RUNNING].is_set()
        one.resume_engines()
        await ours.wait_until(state.RESUMED)
        assert ours.state is state.PAUSED
        one.unpause_engines()
        await ours.wait_until(state.RUNNING)
        assert (await waiting).generated_tokens == expected[0]
        cut = one.add_request(IDS[0], greedy())
        one.abort_request(one.next_request_id - 1)
        with pytest.raises(asyncio.CancelledError):
            await cut
        one.pause_engines()
        await ours.wait_until(state.PAUSED)
        http.stop_text_gen_server()
        one.stop_engines()
        await ours.wait_until(state.STOPPED)
        await ours.engine_loop_task
        with pytest.raises(WrongState, match="has stopped"):
            await ours.wait_until(state.RUNNING)
        one.shutdown_coordinator()
        one.stop()
        with pytest.raises(NotLeader):
            client.InferenceClient(address).stop_engines()

    asyncio.run(job())


@pytest.mark.long
def test_a_command_that_fails_is_raised_where_its_state_is_waited_for():
    ours = chain(tiny_gpt())

    async def job() -> None:
        address = await ours.start_listening_to_data_parallel_coordinator()
        one = client.InferenceClient(address)
        one.suspend_engines()  # of engines that run
        with pytest.raises(Exception, match="suspend_engines\\(\\) is for engines that are paused"):
            await ours.wait_until(engine.States.SUSPENDED)
        one.stop()

    asyncio.run(job())


def ask(port: int) -> dict[str, object]:
    body = {"prompt": IDS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.long
def test_a_script_finds_the_names_replaced(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from megatron.core.inference.contexts import DynamicInferenceContext\n"
        "from megatron.core.inference.engines import DynamicInferenceEngine\n"
        "from megatron.core.inference.inference_client import InferenceClient\n"
        "print(sys.argv[1:], {one.__module__ for one in"
        " (DynamicInferenceContext, DynamicInferenceEngine, InferenceClient)})\n"
    )
    command = [sys.executable, "-m", "megatron_infer.mcore", str(script), "--x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "['--x'] {" in done.stdout and done.stdout.count("megatron_infer.mcore.") == 3


LACKING = """
import importlib, warnings
from megatron_infer import mcore
found = importlib.import_module
def lacking(name, package=None):
    if name.endswith("text_generation_server.dynamic_text_gen_server.text_generation_server"):
        raise ModuleNotFoundError("No module named 'quart'", name="quart")
    return found(name, package)
importlib.import_module = lacking
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    print("DynamicInferenceEngine" in mcore.install(), *(one.message for one in seen), sep="\\n")
"""


@pytest.mark.long
def test_a_package_that_a_scripts_module_lacks_is_named():
    # in a process of its own: the names stay replaced
    done = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("True\n")
    assert re.search("start_text_gen_server stays megatron-core's.*no package 'quart'", done.stdout)
