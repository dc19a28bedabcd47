"""TRL's rollout_func uses the trainer's weights, sampling parameters and prompts; once with the real trainer."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import random_model
from session_case import BASE
from tiny_llama import save_tiny_llama

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, ModelError, RequestError
from megatron_infer.rl.frameworks.trl import EngineRollout, engine_for

transformers = pytest.importorskip("transformers")
CONFIG = InferenceConfig(**BASE | {"logprobs_mode": "processed", "max_requests": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def stand_in(model: Any, folder: Path, **changes: Any) -> SimpleNamespace:
    """The attributes of a GRPOTrainer that the adapter reads."""
    settings = {
        "accelerator": SimpleNamespace(unwrap_model=lambda given: given),
        "model": model,
        "state": SimpleNamespace(global_step=0),
        "args": SimpleNamespace(generation_kwargs=None),
        "processing_class": transformers.AutoTokenizer.from_pretrained(folder),
        "tools": None,
        "chat_template": None,
        "chat_template_kwargs": {},
        "max_completion_length": 6,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    return SimpleNamespace(**settings | changes)


def logprobs_by_transformers(model: Any, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def test_rollouts_are_drawn_from_the_trainers_present_weights(model, folder):
    trainer = stand_in(model, folder)
    rollout = EngineRollout(engine_for(model, CONFIG), suspend="recompute")
    chat = [{"role": "user", "content": "Hi"}]
    for step in range(2):
        out = rollout(["What is it?"] * 3 + [chat] * 2, trainer)
        assert rollout.engine.state is EngineState.SUSPENDED and rollout.report.version == step + 1
        assert [len(set(map(tuple, out["prompt_ids"][a:b]))) for a, b in ((0, 3), (3, 5))] == [1, 1]
        assert trainer.processing_class.decode(out["prompt_ids"][4]).endswith("<|im_start|>assistant\n")
        assert len(set(map(tuple, out["completion_ids"]))) == 5
        for prompt, answer, logprobs in zip(*out.values(), strict=True):
            expected = logprobs_by_transformers(model, prompt, answer, 0.8)
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-5, rtol=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.02)
        trainer.state.global_step += 1


def test_a_completion_ends_with_the_end_token_of_the_trainers_tokenizer(model, folder):
    """The model's configs name another one."""
    rollout = EngineRollout(engine_for(model, CONFIG), sampling={"temperature": 0.0, "stop_token_ids": [259]})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (free,) = rollout(["What is it?"], stand_in(model, folder))["completion_ids"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[2])
    (ended,) = rollout(["What is it?"], stand_in(model, folder, processing_class=tokenizer))["completion_ids"]
    assert ended == free[: free.index(free[2]) + 1] != free


def test_model_whose_experts_are_stacked_in_memory_is_refused_before_training():
    with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM: weights of its experts are taken as files name them"):
        engine_for(random_model("qwen3_moe"), CONFIG)


def test_options_without_a_counterpart_are_refused(model, folder):
    engine = engine_for(model, CONFIG)
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        EngineRollout(engine, sampling={"temperatur": 1.0})
    rollout = EngineRollout(engine)
    with pytest.raises(ConfigError, match=r"num_beams.*EngineRollout\(sampling"):
        rollout(["a"], stand_in(model, folder, args=SimpleNamespace(generation_kwargs={"num_beams": 4})))
    adapted = SimpleNamespace(peft_config={})
    with pytest.raises(NotImplementedError, match="PEFT"):
        EngineRollout(engine)(["a"], stand_in(adapted, folder))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install trl")
def test_grpo_trainer_learns_with_the_engines_rollouts(folder, tmp_path, monkeypatch):
    """TRL's own loop: the share of a letter in the answers grows, and the weights are copied after every step."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    live = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rollout = EngineRollout(engine_for(live, CONFIG))
    versions: list[int] = []

    def share(completions: list[str], **_: Any) -> list[float]:
        versions.append(rollout.engine.weight_version)
        return [text.count("e") / max(1, len(text)) for text in completions]

    table = InMemoryTable.from_pydict({"prompt": [f"Say {word}:" for word in ("yes", "no", "me", "he")]})
    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        max_steps=25,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        beta=0.0,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=live,
        reward_funcs=share,
        args=config,
        train_dataset=Dataset(table, fingerprint="questions"),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        rollout_func=rollout,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert versions == list(range(1, 26))
    assert sum(rewards[-5:]) / 5 > 3 * max(sum(rewards[:5]) / 5, 0.01), rewards
