"""Clients written for other servers work against this one."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from control_case import get, serving_with_control, state_of
from server_case import tokenizer

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.frameworks.trl import ServerWeights, engine_for
from megatron_infer.rl.weight_receiver import WeightReceiver

transformers = pytest.importorskip("transformers", reason="not installed: transformers")
NEEDED = ("trl", "aiohttp", "accelerate", "requests", "datasets")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
END = 257


def trained(seed):
    """A transformers model, as TRL trains it; ids are bytes and two marks."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=END,
        architectures=["LlamaForCausalLM"], tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@contextlib.contextmanager
def served(model):
    """A server with a megatron-core model of the same weights."""
    settings = {"buffer_size_gb": 0.02, "block_size_tokens": 16, "max_sequence_length": 256, "max_requests": 8}
    engine = engine_for(model, InferenceConfig(**settings, logprobs_mode="processed"))
    with serving_with_control(engine, commands_of=lambda one: WeightReceiver(one).commands()) as case:
        transfer = ServerWeights(case.url, max_bytes=20_000)
        sync(transfer, model)
        yield case, transfer


def sync(transfer, model):
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights((name, value.detach()) for name, value in model.named_parameters())
    transfer.resume()


def expected_logprobs(model, sample):
    """Logprobs of the policy's sampled tokens by the forward of transformers."""
    ids = torch.as_tensor(sample.input_ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def distinct_ids(completion_ids, **_):
    """A reward function with a name that the worker processes can import."""
    return [float(len(set(ids))) for ids in completion_ids]


@contextlib.contextmanager
def rollouts(case, monkeypatch):
    """TRL's worker in its own process, sampling groups of three from the server."""
    import trl
    from trl.experimental.async_grpo import async_rollout_worker

    # it asks for the package vllm to be installed, and uses nothing of it
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda *_, **__: True)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    reading = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    reading.chat_template = template.read_text()
    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name="tiny", dataset=[{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "hello")],
        reward_funcs=[distinct_ids], processing_class=reading, eos_token_ids=[END], num_generations=3,
        max_inflight_tasks=6, queue_maxsize=6, vllm_server_url=case.url, max_tokens=12, temperature=1.0, top_k=0,
    )  # fmt: skip
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_rollout_worker_of_trl_has_groups_with_the_policys_own_log_probabilities_before_and_after_a_sync(monkeypatch):
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # its logger wants one
    old, new = trained(0), trained(1)
    with served(old) as (case, transfer):
        client = VLLMClient(case.url, 20)
        client.wait_for_server_ready()
        assert client.get_dtype() == "torch.float32" and client.get_max_model_len() == 256
        assert client.get_world_size() == 1 and client.get_server_info()["lora_config"] is None
        with rollouts(case, monkeypatch) as worker:
            for model, version in ((old, 0), (new, 1)):
                fresh = []
                while len(fresh) < 6:
                    sample = worker.rollout_buffer.get(timeout=60)
                    fresh += [sample] if sample.model_version == version else []
                for sample in fresh:
                    drawn = torch.as_tensor(sample.completion_mask[1:]).bool()
                    found = torch.as_tensor(sample.old_log_probs[1:]).double()
                    assert 1 <= drawn.sum() <= 12
                    torch.testing.assert_close(found[drawn], expected_logprobs(model, sample)[drawn], atol=2e-4, rtol=0)
                    completion = sample.input_ids[1:][drawn.numpy()].tolist()
                    assert sample.metrics["reward"] == len(set(completion))
                if version == 0:
                    client.pause()
                    transfer.send_weights((name, value.detach()) for name, value in new.named_parameters())
                    client.resume()
                    while not worker.rollout_buffer.empty():  # the trainer drops them by their version
                        worker.rollout_buffer.get(timeout=10)
                    worker.update_model_version(1)
            worker.check_health(60)


def test_weights_sent_to_the_server_are_applied_whole_or_not_at_all():
    old, new = trained(0), trained(1)
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    with served(old) as (case, transfer):

        def drawn():
            return case.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

        first, version = drawn(), transfer.weight_version
        tensors = [(name, value.detach()) for name, value in new.named_parameters()]
        for broken in (tensors[:-1], [*tensors[:-1], (tensors[-1][0], torch.zeros(5))]):
            with pytest.raises(WeightUpdateError, match="answered 400"):
                transfer.send_weights(broken)
            assert state_of(case) == "SERVING" and drawn() == first
        sync(transfer, new)
        assert drawn() != first and transfer.weight_version == version + 1
        assert get(case, "/get_weight_version")["weight_version"] == str(version + 1)
