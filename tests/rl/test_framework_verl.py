"""verl's rollout backend: its classes against the recorded surface of verl, its promises in one process, and verl's own
trainer where verl is installed (`make frameworks`)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import make_engine
from gloo_ranks import run_on_ranks
from megatron.core import parallel_state
from session_case import BASE, copied, make_session
from tiny_llama import save_tiny_llama
from verl_surface import VALUES, recorded, rollout_config, stand_ins

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InferenceError, OtherRankFailed, WeightUpdateError
from megatron_infer.rl.frameworks.engine_host import EngineHost
from megatron_infer.testing.tiny import tiny_gpt

transformers = pytest.importorskip("transformers")
MODULE = "megatron_infer.rl.frameworks.verl"
SMALL = {"block_size_tokens": 16, "buffer_size_gb": 0.01, "max_requests": 8, "max_tokens": 64}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def verl() -> Any:
    with imported() as one:
        yield one


@contextlib.contextmanager
def imported() -> Any:
    """The backend, imported over stand-ins of verl and Ray."""
    modules = stand_ins()
    ours = {name: module for name, module in sys.modules.items() if name.startswith(MODULE)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ours:
            patch.delitem(sys.modules, name)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        importlib.import_module(MODULE)
        assert not [name for name in sys.modules if name.startswith(f"{MODULE}.")], "names are registered, no more"
        parts = ("rollout", "server_calls", "server", "weights")
        loaded = {name: importlib.import_module(f"{MODULE}.{name}") for name in parts}
        yield SimpleNamespace(**loaded, ray=modules["ray"])
        for name in [name for name in sys.modules if name.startswith(MODULE)]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def trained(folder) -> Any:
    """The model that a trainer with modules of transformers has."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def config_of(**changes: Any) -> Any:
    values = {
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "prompt_length": 64,
        "response_length": 32,
        "engine_kwargs": {"megatron_infer": SMALL},
    }
    return rollout_config(**values | changes)


class Live:
    """As `live.LiveWeights`."""

    def __init__(self, model: Any) -> None:
        self.module, self.is_exact = [model], False

    def score_exactly(self) -> None:
        self.is_exact = True


class Replica:
    """A replica as verl drives it: the server actor, and the worker that updates weights."""

    def __init__(self, verl: Any, folder: Path, **changes: Any) -> None:
        config = config_of(**changes)
        hf = transformers.AutoConfig.from_pretrained(folder)
        model_config = SimpleNamespace(hf_config=hf, generation_config=None, tokenizer=None)
        replica = verl.rollout.EngineReplica(0, config, model_config)
        replica.is_reward_model = replica.is_teacher_model = False
        replica.replica_rank, replica.config, replica.max_concurrency = 0, config, 1000
        verl.ray.actors.clear()
        asyncio.run(replica.launch_servers())
        self.server, self.rollout = replica._server_handle, verl.rollout.EngineRollout(config, model_config, None)
        self.rollout.config, self.rollout.model_config = config, model_config

    def update(self, weights: Any, step: int | None = 0, **how: Any) -> None:
        asyncio.run(self.rollout.update_weights(weights, global_steps=step, **how))
        self.call("resume_kv_cache")

    def start(self, prompt: list[int] = PROMPT, **given: Any) -> Any:
        return self.server.generate.remote(
            prompt_ids=prompt, sampling_params=SAMPLING | given, request_id="r", image_data=None, video_data=None
        )

    def generate(self, prompt: list[int] = PROMPT, **given: Any) -> Any:
        return self.start(prompt, **given).result(60)

    def call(self, name: str, **how: Any) -> Any:
        return getattr(self.server, name).remote(**how).result(60)


def weights_of(model: Any) -> Any:
    return ((name, tensor.detach()) for name, tensor in model.state_dict().items())


def logprobs_by_transformers(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


# ------------------------------------------------------------------ the recorded surface


def test_each_class_answers_what_verl_calls(verl):
    """Parameters of the base take the same names, a method is a coroutine where verl's is, nothing abstract is left."""
    surface = recorded()["classes"]
    for ours, base in (
        (verl.rollout.EngineRollout, "verl.workers.rollout.base.BaseRollout"),
        (verl.rollout.EngineReplica, "verl.workers.rollout.replica.RolloutReplica"),
        (verl.weights.GlooWeights, "verl.checkpoint_engine.base.CheckpointEngine"),
    ):
        assert not ours.__abstractmethods__, ours
        for name, theirs in surface[base].items():
            mine = inspect.getattr_static(ours, name, None) if name in vars(ours) else None
            if mine is None:
                assert not theirs["abstract"], (ours, name)
                continue
            mine = getattr(mine, "__func__", mine)
            is_async = inspect.iscoroutinefunction(mine) or inspect.isasyncgenfunction(mine)
            assert is_async == theirs["async"], (ours, name)
            names = [one.partition("=")[0] for one in theirs["parameters"].split(", ") if not one.startswith("*")]
            known = inspect.signature(mine).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
            assert takes_any or set(names) <= set(known), (ours, name)


def test_server_has_every_method_that_verls_replica_calls(verl):
    for name in recorded()["server_calls"]:
        assert inspect.iscoroutinefunction(getattr(verl.server.RolloutServer, name)), name


def test_fields_of_verls_config_that_are_read_exist(verl):
    fields = recorded()["rollout_config"]
    for path in [*verl.rollout.OPTIONS, *verl.rollout.ONLY]:
        value: Any = fields
        for part in path.split("."):
            value = value[part]
    for function in (
        verl.rollout.engine_options,
        verl.rollout.EngineRollout,
        sys.modules[f"{MODULE}.server_calls"].sampling_params,
    ):
        read = set(re.findall(r"(?<!model_)(?<!engine\.)config\.(\w+)", inspect.getsource(function)))
        assert read <= set(fields), "of `config`, which is verl's RolloutConfig"


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make frameworks")
@pytest.mark.slow
def test_record_is_of_the_installed_verl():
    path = Path(__file__).with_name("verl_surface.py")
    found = subprocess.run([sys.executable, "-W", "ignore", path], capture_output=True, text=True, check=True).stdout
    assert found.strip() == path.with_suffix(".json").read_text(encoding="utf-8").strip()
    assert set(VALUES) <= set(recorded())


# ------------------------------------------------------------------ promises, in one process


def test_tokens_and_log_probabilities_are_those_of_the_weights_given(verl, folder, trained):
    replica = Replica(verl, folder)
    waiting = replica.start(max_tokens=6)  # before any weights
    for step in (3, 4):
        replica.update(weights_of(trained), step)
        assert replica.rollout.report.bytes_copied > 0
        out = waiting.result(60) if step == 3 else replica.generate(max_tokens=6)
        expected = logprobs_by_transformers(trained, PROMPT, out.token_ids)
        torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=0)
        assert out.extra_fields["global_steps"] == out.extra_fields["min_global_steps"] == step
        replica.call("sleep")
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def test_aborted_requests_return_what_they_have_and_later_ones_wait(verl, folder, trained):
    replica = Replica(verl, folder, ignore_eos=True, response_length=100, max_model_len=164)
    replica.update(weights_of(trained))
    began = threading.Event()
    host = replica.rollout._host
    take = host._thread.engine.step

    def slow() -> Any:
        began.set()
        return take()

    host._thread.engine.step = slow
    running = replica.start(max_tokens=100)
    assert began.wait(60)
    replica.call("abort_all_requests")
    cut = running.result(60)
    assert cut.stop_reason == "aborted" and len(cut.token_ids) == len(cut.log_probs) < 100
    later = replica.start(PROMPT + cut.token_ids, max_tokens=5)
    with pytest.raises(TimeoutError):
        later.result(0.5)
    replica.call("abort_all_requests", reject_request=True)
    assert later.result(60).stop_reason == "aborted"
    replica.call("resume_generation")
    rest = replica.generate(PROMPT + cut.token_ids, max_tokens=5)
    expected = logprobs_by_transformers(trained, PROMPT + cut.token_ids, rest.token_ids)
    torch.testing.assert_close(torch.tensor(rest.log_probs), expected, atol=2e-5, rtol=0)


def test_update_that_fails_leaves_the_weights_before_it_and_drains_the_generator(verl, folder, trained):
    replica = Replica(verl, folder)
    replica.update(weights_of(trained), 1)
    before = replica.generate(temperature=0.0, max_tokens=8, logprobs=False).token_ids
    seen: list[str] = []

    def broken(kind: str) -> Any:
        for index, (name, tensor) in enumerate(trained.state_dict().items()):
            seen.append(name)
            if kind == "dies" and index == 5:
                raise ConnectionError("the trainer is gone")
            yield name, tensor[:-1] if kind == "shape" and index == 3 else tensor.neg()

    for kind, expected, message in (
        ("shape", WeightUpdateError, "has shape"),
        ("dies", ConnectionError, "the trainer is gone"),
    ):
        seen.clear()
        with pytest.raises(expected, match=message):
            replica.update(broken(kind), 2)
        assert len(seen) == (len(trained.state_dict()) if kind == "shape" else 6)
        asyncio.run(replica.rollout.resume(["kv_cache"]))
        out = replica.generate(temperature=0.0, max_tokens=8, logprobs=False)
        assert out.token_ids == before and out.extra_fields["global_steps"] == 1 and out.log_probs is None


def test_live_model_generates_without_a_copy_and_is_the_trainers_while_asleep(verl, folder):
    live = tiny_gpt(vocab_size=128, max_sequence_length=512, init_method_std=0.2).train()
    replica = Replica(verl, folder)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for step in (1, 2):
        replica.update(Live(live), step)
        report = replica.rollout.report
        assert (report.version, report.bytes_copied, report.bytes_received) == (step, 0, 0)
        out = replica.generate(temperature=0.0, max_tokens=8)
        assert not live.training
        replica.call("sleep")
        assert live.training
        (expected,) = make_engine(copied(live).eval(), **BASE).generate([PROMPT], params)
        assert out.token_ids == expected.outputs[0].token_ids and out.extra_fields["global_steps"] == step
        with torch.no_grad():
            for parameter in live.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def test_what_has_no_counterpart_is_refused_by_name(verl, folder, trained):
    for changes, message in (
        ({"data_parallel_size": 2}, "rollout.data_parallel_size is 2"),
        ({"quantization": "fp8"}, "rollout.quantization is 'fp8'"),
        ({"prometheus": SimpleNamespace(enable=True)}, "rollout.prometheus.enable is True"),
    ):
        with pytest.raises(ConfigError, match=message):
            Replica(verl, folder, **changes)
    replica = Replica(verl, folder, engine_kwargs={"megatron_infer": {"max_request": 4}})
    with pytest.raises(ConfigError, match="did you mean 'max_requests'"):
        replica.update(weights_of(trained))
    replica = Replica(verl, folder)
    with pytest.raises(WeightUpdateError, match=r"lora\.merge=True"):
        replica.update(weights_of(trained), peft_config={"r": 8})
    with pytest.raises(WeightUpdateError, match="delta_flush"):
        replica.update(weights_of(trained), wire_format="delta_flush")
    replica.update(weights_of(trained))
    for given, message in (({"temperatur": 1.0}, "did you mean 'temperature'"), ({"n": 0}, "n is 0")):
        with pytest.raises(InferenceError, match=message):
            replica.generate(**given)
    with pytest.raises(InferenceError, match="PromptTooLong"):
        replica.generate(list(range(4, 120)))
    assert replica.generate(max_tokens=2).token_ids  # the others' errors were theirs


def test_log_probabilities_of_a_live_model_are_to_the_bit_those_of_its_forward_in_exact_mode(verl, folder):
    live = tiny_gpt(vocab_size=128, max_sequence_length=512, init_method_std=0.2).train()
    replica, weights = (
        Replica(verl, folder, engine_kwargs={"megatron_infer": SMALL | {"batch_invariant": True}}),
        Live(live),
    )
    replica.update(weights, 1)
    assert weights.is_exact
    calls = [replica.start(list(range(4, 9 + 3 * n)), max_tokens=12, ignore_eos=True) for n in range(5)]
    outs = [call.result(60) for call in calls]
    replica.call("sleep")
    sequences = [list(range(4, 9 + 3 * n)) + out.token_ids for n, out in enumerate(outs)]
    scores = replica.rollout._host.session.score(sequences, start=[5 + 3 * n for n in range(5)])
    assert [score.tolist() for score in scores] == [out.log_probs for out in outs]


def two_ranks(rank: int, size: int, folder: Path) -> None:
    """A replica of two ranks: every rank has the trainer's tensors, the first has the server."""
    os.environ["RANK"] = str(rank)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with imported() as verl:
        replica = Replica(verl, folder, tensor_model_parallel_size=size)
        rollout = replica.rollout
        assert (rollout.replica_rank, rollout.is_leader_rank) == (0, rank == 0)
        live = tiny_gpt(vocab_size=128, max_sequence_length=512)
        kinds = [type(part) for part in live.modules()]
        with pytest.raises(ConfigError, match="model has 1 ranks, a replica of the rollout has 2"):
            asyncio.run(rollout.update_weights(Live(live), global_steps=0))
        assert rollout._host is None and kinds == [type(part) for part in live.modules()]
        for step in (1, 2, 3):
            asyncio.run(rollout.update_weights(weights_of(model), global_steps=step))
            asyncio.run(rollout.resume(["kv_cache"]))
            if rank == 0:
                replica.call("clear_kv_cache")
                outs = [call.result(60) for call in [replica.start(max_tokens=6) for _ in range(3)]]
                for out in outs:
                    expected = logprobs_by_transformers(model, PROMPT, out.token_ids)
                    torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=0)
                    assert out.extra_fields["global_steps"] == step
                replica.call("abort_all_requests")
                replica.call("resume_generation")
            asyncio.run(rollout.release())
            torch.distributed.barrier()
            if step == 2:
                broken = ((name, tensor[:-1]) for name, tensor in weights_of(model))
                with pytest.raises(WeightUpdateError, match="has shape"):
                    asyncio.run(rollout.update_weights(broken, global_steps=9))
            for index, parameter in enumerate(model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.data.add_(noise, alpha=0.02)
        torch.distributed.barrier()
        if rank == 0:
            rollout._host._thread.call(rollout._host.session.engine.dismiss).result(60)


@pytest.mark.long
def test_replica_of_two_tensor_parallel_ranks_draws_by_the_weights_given(folder, tmp_path):
    run_on_ranks(two_ranks, 2, folder)


def late_on_a_rank(rank: int, size: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(size)
    model = tiny_gpt(vocab_size=128, tensor_model_parallel_size=size)
    host = EngineHost(make_session(model, settings={"collective_timeout_s": 8}, meter=None))
    if rank == 0:
        with pytest.raises(OtherRankFailed, match="did not update the weights here within 8 s"):
            host.update(lambda: "first").result(60)
        torch.distributed.barrier()
    else:
        torch.distributed.barrier()
        with pytest.raises(WeightUpdateError, match="weight update 1 came too late"):
            host.update(lambda: "first").result(5)
    assert host.update(lambda: f"second on {rank}").result(60) == f"second on {rank}"
    torch.distributed.barrier()
    if rank == 0:
        host._thread.call(host.session.engine.dismiss).result(60)


@pytest.mark.long
def test_update_that_is_late_on_one_rank_fails_on_all_and_is_not_taken_for_the_next(tmp_path):
    run_on_ranks(late_on_a_rank, 2, tmp_path)


# ------------------------------------------------------------------ weights by gloo


def exchange(verl: Any, pairs: Any, *, num_receivers: int = 2, dies: bool = False) -> list[Any]:
    """An update of `pairs` -> what each receiver got, or its error."""
    weights = verl.weights
    sender = weights.GlooWeights(256, is_master=True, timeout_s=20)
    receivers = [weights.GlooWeights(256, timeout_s=20) for _ in range(num_receivers)]
    metadata = [one.prepare() for one in (sender, *receivers)]
    (ours, theirs) = weights.GlooWeights.build_topology(1, num_receivers, metadata)
    found: list[Any] = [None] * num_receivers

    def receive(index: int) -> None:
        async def all_pairs() -> Any:
            return [(name, tensor.clone()) async for name, tensor in receivers[index].receive_weights()]

        try:
            receivers[index].init_process_group(**{key: values[index] for key, values in theirs.items()})
            found[index] = asyncio.run(all_pairs())
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(num_receivers)]
    for thread in threads:
        thread.start()
    sender.init_process_group(**{key: values[0] for key, values in ours.items()})
    try:
        asyncio.run(sender.send_weights(pairs))
    except Exception as error:
        found.append(error)
    if dies:
        sender.finalize()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_gloo_brings_every_tensor_in_any_dtype_and_shape(verl):
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(200, 3),  # larger than a bucket
        "c": torch.tensor(3.5),
        "d": torch.arange(7, dtype=torch.int8),
        "e": torch.randn(4, 6).t(),
    }
    for got in exchange(verl, iter(tensors.items())):
        assert [name for name, _ in got] == list(tensors)
        for name, tensor in got:
            assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name


def test_trainer_that_fails_while_sending_is_named_by_every_receiver(verl):
    def broken() -> Any:
        yield "a", torch.randn(200)
        raise MemoryError("no room for layer 7")

    *got, error = exchange(verl, broken())
    assert isinstance(error, MemoryError)
    for one in got:
        assert isinstance(one, WeightUpdateError) and "no room for layer 7" in str(one)


# ------------------------------------------------------------------ verl's own code


A = "actor_rollout_ref"
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 64,
    "data.max_response_length": 8,
    "data.dataloader_num_workers": 0,
    f"{A}.actor.optim.lr": 1e-3,
    f"{A}.actor.ppo_mini_batch_size": 4,
    f"{A}.actor.ppo_micro_batch_size_per_gpu": 2,
    f"{A}.rollout.name": "megatron_infer",
    f"{A}.rollout.n": 2,
    f"{A}.rollout.tensor_model_parallel_size": 1,
    f"{A}.rollout.agent.num_workers": 1,
    f"{A}.rollout.log_prob_micro_batch_size_per_gpu": 2,
    f"{A}.ref.log_prob_micro_batch_size_per_gpu": 2,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 2,
    "trainer.logger": '["console"]',
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.device": "cpu",
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "+ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": 1,
}
FSDP2 = {
    f"+{A}.model.override_config.attn_implementation": "sdpa",
    f"{A}.model.use_remove_padding": False,
    f"{A}.actor.strategy": "fsdp2",
    f"{A}.actor.fsdp_config.model_dtype": "fp32",
    f"++{A}.actor.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
    f"{A}.actor.use_torch_compile": False,
    f"{A}.actor.fsdp_config.use_torch_compile": False,
    f"{A}.rollout.dtype": "float32",
}
LIVE = {
    "model_engine": "megatron",
    f"{A}.model.external_lib": f"[verl_megatron_on_cpu,{MODULE}.live]",
    f"{A}.model.use_remove_padding": False,
    f"{A}.actor.megatron.use_remove_padding": False,
}
"""The worker's bf16, padded batches: on a CPU nothing else can run."""
for name in (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
):
    LIVE[f"+{A}.actor.megatron.override_transformer_config.{name}"] = False
LIVE[f"+{A}.actor.megatron.override_transformer_config.use_cpu_initialization"] = True
EXACT = LIVE | {
    f"+{A}.rollout.engine_kwargs.megatron_infer": "{batch_invariant: true}",
    f"{A}.model.use_remove_padding": True,
    f"{A}.actor.megatron.use_remove_padding": True,
}
TWO_RANKS = {
    f"{A}.actor.megatron.tensor_model_parallel_size": 2,
    f"{A}.rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 2,
    "+ray_kwargs.ray_init.num_gpus": 2,
}
"""Tensor-parallel, with sequence parallelism as verl has it then."""
EXACT_RANKS = TWO_RANKS | {f"{A}.actor.megatron.sequence_parallel": False}
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return len(set(solution_str))
"""


def run_verl(command: list[Any], folder: Path) -> str:
    """Output of a command of verl on the CPU platform; the plugin is found by its entry point."""
    tests = Path(__file__).parents[1]
    parts = [
        tests / "support",
        tests.parent,
        *(tests / "models" / name for name in ("recurrent_stand_ins", "stand_ins")),
    ]
    known = {name: text for name, text in os.environ.items() if not name.startswith("NVTE_")}  # of models built here
    environment = known | {
        "PYTHONPATH": os.pathsep.join(map(str, parts)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "HYDRA_FULL_ERROR": "1",
    }
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


PLUGIN = f"""
import sys, verl
from verl.workers.rollout import base, replica
loaded = [name for name in sys.modules if name.startswith("megatron_infer.rl.frameworks.verl")]
assert loaded == ["{MODULE}"] and not [name for name in sys.modules if name.startswith("megatron.core")], loaded
assert base.get_rollout_class("megatron_infer").__module__ == "{MODULE}.rollout"
assert replica.get_rollout_replica_class("megatron_infer").__module__ == "{MODULE}.rollout"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make frameworks")
def test_import_of_verl_finds_the_plugin_by_its_entry_point_and_loads_names_alone(tmp_path):
    run_verl(["-c", PLUGIN], tmp_path)


INEXACT = f"""
import verl_megatron_on_cpu
from types import SimpleNamespace
from megatron_infer.errors import ConfigError
from {MODULE}.live import LiveWeights
exact = {{"pipeline_model_parallel_size": 1, "sequence_parallel": False, "use_fused_kernels": False}}
inexact = {{"pipeline_model_parallel_size": 2, "sequence_parallel": True, "use_fused_kernels": True}}
for change in ({{}}, *({{name: value}} for name, value in inexact.items())):
    trainer = SimpleNamespace(module=[None], engine_config=SimpleNamespace(**exact | change), is_exact=False)
    try:
        LiveWeights(trainer, iter(())).score_exactly()
    except ConfigError as error:
        assert str(error).startswith("batch_invariant=True with ") and next(iter(change)) in str(error), error
    assert trainer.is_exact == (not change), change
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make frameworks")
def test_worker_that_has_no_exact_forward_is_refused_by_name(tmp_path):
    run_verl(["-c", INEXACT], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make frameworks")
@pytest.mark.parametrize(
    ("worker", "most"),
    [(FSDP2, 1e-5), (LIVE, 0.05), (EXACT, 0.0), (LIVE | TWO_RANKS, 0.05), (EXACT | EXACT_RANKS, 0.0)],
    ids=["fsdp2", "megatron", "exact", "megatron on two ranks", "exact on two ranks"],
)
def test_grpo_of_verls_own_trainer_draws_by_the_weights_that_it_trains(worker, most, folder, tmp_path):
    """most: of probabilities, between rollout and trainer. The Megatron worker's bf16 is rounded in each layer."""
    pandas = pytest.importorskip("pandas")
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"word {index}"}],
            "reward_model": {"style": "rule", "ground_truth": "e"},
            "extra_info": {"index": index},
        }
        for index in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    files = {
        "data.train_files": tmp_path / "data.parquet",
        "data.val_files": tmp_path / "data.parquet",
        f"{A}.model.path": folder,
        "reward.custom_reward_function.path": tmp_path / "reward.py",
    }
    out = run_verl(["-m", "verl.trainer.main_ppo", *(f"{k}={v}" for k, v in (GRPO | worker | files).items())], tmp_path)
    found = [float(one) for one in re.findall(r"training/rollout_probs_diff_max:([0-9.e-]+)", out)]
    assert len(found) == 2 and max(found) <= most, out[-4000:]
    assert all(float(one) > 0 for one in re.findall(r"actor/grad_norm:([0-9.e-]+)", out)), "nothing was trained"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make frameworks")
@pytest.mark.parametrize("case", ["verl_classes_case.py", "verl_servers_case.py"])
def test_standalone_server_has_the_weights_that_verls_checkpoint_engine_sends(case, folder, trained, tmp_path):
    """By verl's classes in one process, and by its managers and workers over Ray."""
    out = run_verl([Path(__file__).with_name(case), folder], tmp_path)
    found = json.loads(out.partition("FOUND ")[2].splitlines()[0])
    total = sum(tensor.nbytes for tensor in trained.state_dict().values())
    assert found["metrics"]["megatron_infer/weight_bytes_sent"] >= total
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)
    first = found["first"]
    expected = logprobs_by_transformers(trained, PROMPT, first["token_ids"])
    torch.testing.assert_close(torch.tensor(first["log_probs"]), expected, atol=2e-5, rtol=0)
    assert all(len(one["token_ids"]) == len(one["log_probs"]) == 200 for one in found["long"])
    spans = {
        (one["extra_fields"]["min_global_steps"], one["extra_fields"]["max_global_steps"]) for one in found["long"]
    }
    assert (1, 2) in spans  # begun by the weights of step 1, continued by those of step 2
