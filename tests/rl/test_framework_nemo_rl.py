"""NeMo-RL's GenerationInterface on the policy's live model: against the recorded interface in every run, and by
NeMo-RL's own code over Ray where NEMO_RL is a checkout of it (`make frameworks`)."""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from child_paths import python_path
from nemo_rl_surface import GENERATION, MCORE, RECORD, Batch, recorded, stand_ins
from plain_forward import full_logits
from session_case import copied
from tiny_llama import save_tiny_llama

from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.testing.tiny import tiny_gpt

MODULE = "megatron_infer.rl.frameworks.nemo_rl"
NEMO = os.environ.get("NEMO_RL", "")
PROMPTS = [[40, 41, 42], [50, 51], [60, 61, 62, 63, 64], [70]]


def policy_config(mcore: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    generation = GENERATION | {"mcore_generation_config": MCORE | (mcore or {})} | changes
    return {"generation": generation, "megatron_cfg": {"tensor_model_parallel_size": 1, "sequence_parallel": False}}


class Worker:
    """NeMo-RL's policy worker, as far as it is used; Ray gives every actor the method."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        return model  # its device is the CPU

    async def __ray_call__(self, function: Any, *args: Any, **how: Any) -> Any:
        return function(self, *args, **how)

    async def __ray_ready__(self) -> bool:
        return True


@pytest.fixture(scope="module")
def nemo_rl() -> Any:
    """The backend, imported over stand-ins of NeMo-RL and Ray."""
    modules = stand_ins()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith(MODULE)]:
            patch.delitem(sys.modules, name)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        generation, outputs = (importlib.import_module(f"{MODULE}.{one}") for one in ("generation", "outputs"))
        yield SimpleNamespace(**vars(generation), outputs=outputs)
        for name in [name for name in sys.modules if name.startswith(MODULE)]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_tiny_llama(tmp_path_factory.mktemp("llama")))


def live_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tiny_gpt(vocab_size=260, max_sequence_length=256, init_method_std=0.2).train()


class Case:
    """A policy of workers with a model each, and the generation on them."""

    def __init__(self, nemo_rl: Any, tokenizer: Any, *models: Any, config: Any = None, **how: Any) -> None:
        self.models = models or (live_model(),)
        actors = [nemo_rl.ray.remote(Worker).options().remote(model, tokenizer) for model in self.models]
        policy = SimpleNamespace(worker_group=SimpleNamespace(workers=actors))
        self.generation = nemo_rl.EngineGeneration(config or policy_config(), tokenizer, policy=policy, **how)
        self.workers = [actor.object for actor in actors]

    def session(self, number: int = 0) -> Any:
        return self.workers[number].megatron_infer_host.session


def batch_of(prompts: list[list[int]] = PROMPTS, **more: Any) -> Batch:
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    return Batch({"input_ids": ids, "input_lengths": torch.tensor([len(one) for one in prompts]), **more})


def answers(out: Any) -> list[list[int]]:
    ends = out["unpadded_sequence_lengths"].tolist()
    counts = out["generation_lengths"].tolist()
    return [row[end - n : end].tolist() for row, end, n in zip(out["output_ids"], ends, counts, strict=True)]


def check_logprobs(out: Any, model: Any, prompts: list[list[int]] = PROMPTS) -> None:
    """The prompt is as it was, log probabilities are those of megatron-core's forward, all else is padding."""
    model = copied(model).eval()
    for row, prompt in enumerate(prompts):
        end = int(out["unpadded_sequence_lengths"][row])
        ids = out["output_ids"][row, :end].tolist()
        assert ids[: len(prompt)] == prompt and end == len(prompt) + int(out["generation_lengths"][row])
        logits = full_logits(model, ids)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
        torch.testing.assert_close(out["logprobs"][row, len(prompt) : end], expected, atol=2e-5, rtol=0)
        assert not out["logprobs"][row, : len(prompt)].any() and not out["logprobs"][row, end:].any()
        assert not out["output_ids"][row, end:].any()


def test_interface_has_the_members_and_parameters_of_nemo_rl(nemo_rl):
    assert not nemo_rl.EngineGeneration.__abstractmethods__
    for name, theirs in recorded()["interface"].items():
        mine = vars(nemo_rl.EngineGeneration).get(name)
        if mine is None:
            assert not theirs["abstract"], name
            continue
        names = [one.partition("=")[0] for one in theirs["parameters"].split(", ") if not one.startswith("*")]
        assert set(names) <= set(inspect.signature(mine).parameters), name
    read = {"backend", "colocated", "bad_words", "_pad_token_id", *GENERATION}
    assert read <= set(recorded()["config"])


def test_live_model_generates_without_a_copy_and_is_the_trainers_between(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer)
    generation, (model,) = case.generation, case.models
    assert generation.blocks_training() and generation.wake_carries_weight_updates()
    addresses = [one.data_ptr() for one in model.parameters()]
    seen = []
    for step in range(3):
        generation.prepare_for_generation(tags=["weights"])
        assert model.training, "a refit that has begun wakes nothing"
        generation.prepare_for_generation(tags=["colocated_refit"])
        assert not model.training
        out = generation.generate(batch_of(), greedy=False)
        assert set(out) <= set(recorded()["output"])
        check_logprobs(out, model)
        assert case.session().weight_version == step
        greedy = answers(generation.generate(batch_of(), greedy=True))
        assert generation.prepare_for_generation() and generation.finish_generation(release_gpu=False)
        assert answers(generation.generate(batch_of(), greedy=True)) == greedy, "it still serves"
        generation.finish_generation()
        assert model.training and generation.finish_generation()
        seen.append(greedy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    assert len({str(one) for one in seen}) == 3
    assert [one.data_ptr() for one in model.parameters()] == addresses


def test_rows_come_as_they_finish_from_the_engines_of_all_replicas(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer, live_model(), live_model(), config=policy_config(max_new_tokens=20))
    case.generation.prepare_for_generation()

    async def all_rows() -> Any:
        return [pair async for pair in case.generation.generate_async(batch_of(), greedy=True)]

    pairs = asyncio.run(all_rows())
    assert sorted(row for row, _ in pairs) == [0, 1, 2, 3]
    assert {tuple(out["gen_leader_worker_idx"]) for _, out in pairs} == {(0,), (1,)}
    whole = answers(case.generation.generate(batch_of(), greedy=True))
    assert [answers(out)[0] for _, out in sorted(pairs, key=lambda pair: pair[0])] == whole
    assert case.generation.invalidate_kv_cache()


def test_stop_tokens_and_texts_end_a_row_that_is_not_truncated(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer)
    case.generation.prepare_for_generation()
    out = case.generation.generate(batch_of(), greedy=True)
    free = answers(out)
    assert out["truncated"].tolist() == [True] * 4
    case.generation.cfg["stop_token_ids"] = [free[0][2]]
    out = case.generation.generate(batch_of(), greedy=True)
    assert answers(out)[0] == free[0][: free[0].index(free[0][2]) + 1] and not out["truncated"][0]
    case.generation.cfg["stop_token_ids"] = None
    text = tokenizer.decode(free[1][1])
    out = case.generation.generate(batch_of(stop_strings=[None, [text], None, text]), greedy=True)
    assert len(answers(out)[1]) <= 2 and not out["truncated"][1] and answers(out)[2] == free[2]
    long = [list(range(40, 100))]
    assert len(answers(case.generation.generate(batch_of(long), greedy=True))[0]) == 4  # max_model_len is 64


def test_unfinished_rows_continue_after_a_training_step(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer, config=policy_config({"max_model_len": 256}, max_new_tokens=200))
    generation = case.generation
    generation.prepare_for_generation()

    async def drawn() -> Any:
        return [pair async for pair in generation.generate_async(batch_of(), greedy=False)]

    async def over_a_step() -> Any:
        running = asyncio.create_task(drawn())
        while not case.session().engine.stats().num_running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(generation.finish_generation)
        assert case.models[0].training and not running.done()
        with torch.no_grad():
            for parameter in case.models[0].parameters():
                parameter.mul_(1.01)
        await asyncio.to_thread(generation.prepare_for_generation, tags=["colocated_refit"])
        return await running

    assert [out["generation_lengths"].tolist() for _, out in asyncio.run(over_a_step())] == [[200]] * 4


@pytest.mark.parametrize("lost", ["submit raises", "the worker ends", "aborted"])
def test_rows_whose_worker_is_lost_are_errors(nemo_rl, tokenizer, lost, monkeypatch):
    """No caller waits for ever, and no row that was cut is taken for a whole one."""
    config = policy_config({"max_model_len": 256}, max_new_tokens=200)
    case = Case(nemo_rl, tokenizer, live_model(), live_model(), config=config)
    case.generation.prepare_for_generation()
    monkeypatch.setattr(nemo_rl.outputs, "WATCH_S", 0.05)
    host, worker = case.workers[0].megatron_infer_host, case.workers[0]

    async def gone() -> None:
        raise RuntimeError("the worker is lost")

    def refuse(*args: Any) -> None:
        raise RuntimeError("the worker is lost")

    async def drawn() -> list[Any]:
        running = [asyncio.create_task(one_row()) for _ in range(4)]
        if lost == "aborted":
            while not case.session().engine.stats().num_running:
                await asyncio.sleep(0.01)
            host.abort_all()
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)

    async def one_row() -> Any:
        ((_, out),) = [pair async for pair in case.generation.generate_async(batch_of(PROMPTS[:1]), greedy=True)]
        return out

    if lost == "submit raises":
        monkeypatch.setattr(host, "generate", refuse)
    elif lost == "the worker ends":
        monkeypatch.setattr(host, "generate", lambda *args: Future())
        monkeypatch.setattr(worker, "__ray_ready__", gone)
    found = asyncio.run(drawn())
    failed = [one for one in found if isinstance(one, InferenceError)]
    assert failed and all("aborted after" in str(one) or "the worker is lost" in str(one) for one in failed)
    assert all(out["generation_lengths"].tolist() == [200] for out in found if out not in failed)


def test_outputs_come_in_where_as_many_callers_wait_as_can(nemo_rl, tokenizer, monkeypatch):
    """A put that waited for a caller to leave would wait for ever."""
    monkeypatch.setattr(nemo_rl.outputs, "MAX_WAITING", len(PROMPTS))
    case = Case(nemo_rl, tokenizer)
    case.generation.prepare_for_generation()

    async def all_rows() -> Any:
        return [pair async for pair in case.generation.generate_async(batch_of())]

    assert len(asyncio.run(asyncio.wait_for(all_rows(), 60))) == len(PROMPTS)


def test_output_that_no_caller_comes_for_is_dropped_after_a_time(nemo_rl, monkeypatch):
    monkeypatch.setattr(nemo_rl.outputs, "KEEP_S", 0.1)
    outputs = nemo_rl.outputs.Outputs()

    async def submitted() -> None:
        """The engine has the requests."""

    async def over_the_time() -> None:
        watch = asyncio.create_task(outputs.watch(None, ["fetched", "left"], [submitted()]))
        await outputs.put("fetched", 1, "")
        await outputs.put("left", 2, "")
        assert await outputs.get("fetched") == 1
        await watch
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outputs.get("left"), 0.1)

    asyncio.run(over_the_time())


def test_copies_begin_at_different_replicas(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer, live_model(), live_model())
    case.generation.prepare_for_generation()

    async def leader_of_one_row() -> int:
        rows = copy.copy(case.generation).generate_async(batch_of(PROMPTS[:1]), greedy=True)
        ((_, out),) = [pair async for pair in rows]
        return out["gen_leader_worker_idx"][0]

    assert {asyncio.run(leader_of_one_row()) for _ in range(20)} == {0, 1}


def test_exact_mode_gives_the_bits_of_the_trainers_scores(nemo_rl, tokenizer):
    case = Case(nemo_rl, tokenizer, options={"batch_invariant": True})
    case.generation.prepare_for_generation()
    out = case.generation.generate(batch_of(), greedy=False)
    case.generation.finish_generation()
    ends = out["unpadded_sequence_lengths"].tolist()
    starts = [len(prompt) for prompt in PROMPTS]
    sequences = [row[:end].tolist() for row, end in zip(out["output_ids"], ends, strict=True)]
    scores = case.session().score(sequences, start=starts)
    drawn = [row[a:b].tolist() for row, a, b in zip(out["logprobs"], starts, ends, strict=True)]
    assert [score.tolist() for score in scores] == drawn


def test_what_has_no_counterpart_is_refused_by_name_before_the_model_is_touched(nemo_rl, tokenizer):
    model = live_model()
    kinds = [type(part) for part in model.modules()]
    for config, message in (
        (policy_config(colocated={"enabled": False}), "colocated.enabled is False"),
        (policy_config({"expose_http_server": True}), "expose_http_server is True"),
        (policy_config({"tensor_model_parallel_size": 2}), "tensor_model_parallel_size is not the trainer's 1"),
        (policy_config({"buffer_size": 1}), "buffer_size"),
        (policy_config(bad_words=["no"]), "bad_words"),
    ):
        with pytest.raises(ConfigError, match=message):
            Case(nemo_rl, tokenizer, model, config=config)
    with pytest.raises(ConfigError, match="processor"):
        Case(nemo_rl, tokenizer, model, processor=object())
    with pytest.raises(ConfigError, match="pass policy="):
        nemo_rl.EngineGeneration(policy_config(), tokenizer, cluster=object())
    case = Case(nemo_rl, tokenizer, model)
    assert kinds == [type(part) for part in model.modules()]
    with pytest.raises(InferenceError, match="before prepare_for_generation"):
        case.generation.generate(batch_of())
    case.generation.prepare_for_generation()
    with pytest.raises(InferenceError, match="PromptTooLong"):
        case.generation.generate(batch_of([list(range(4, 104))]))
    assert case.generation.generate(batch_of())["generation_lengths"].tolist() == [6] * 4
    with pytest.raises(ConfigError, match="live model generates"):
        case.generation.init_collective("127.0.0.1", 1, 2, train_world_size=1)


@pytest.mark.long
def test_driver_needs_no_megatron_core():
    """NeMo-RL's driver has an environment without it."""
    code = (
        "import sys, nemo_rl_surface\n"
        "sys.modules |= nemo_rl_surface.stand_ins()\n"
        f"import {MODULE} as found\n"
        "print(found.EngineGeneration.__name__, [name for name in sys.modules if name.startswith('megatron.')])"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[0] == "EngineGeneration []", done.stderr


# ------------------------------------------------------------------ NeMo-RL's own code


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not NEMO or importlib.util.find_spec("ray") is None, reason="make frameworks with NEMO_RL, a checkout of NeMo-RL"
)
@pytest.mark.parametrize("case", ["record", "rollouts", "grpo"])
def test_nemo_rls_own_code_draws_from_the_live_models_of_ray_actors(case, tmp_path):
    folder = save_tiny_llama(tmp_path)
    scripts = {"record": f"{RECORD.stem}.py", "rollouts": "nemo_rl_case.py", "grpo": "nemo_rl_grpo_case.py"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name(scripts[case]), folder, NEMO],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(NEMO), "RAY_raylet_start_wait_time_s": "300"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if case == "record":
        found = done.stdout[done.stdout.index("{") :]
        assert json.loads(found) == recorded()
    elif case == "rollouts":
        assert "every rank done" in done.stdout
    else:
        steps = json.loads(done.stdout.partition("STEPS ")[2].splitlines()[0])
        assert len(steps) == 3
        for one in steps:  # exact mode, by NeMo-RL's own loss
            assert one["gen_kl_error"] == 0 and one["token_mult_prob_error"] == 1 and one["grad_norm"] > 0, steps
