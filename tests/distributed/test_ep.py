"""Experts spread over ranks, or split over them, give the logits of one process; each rank reads its own."""

from __future__ import annotations

import contextlib
from unittest import mock

import paged_step
import pytest
import torch
from engine_ranks import take_part, weights_of
from gloo_ranks import gathered, new_groups, run_on_ranks
from hf_models import random_model
from test_adopt_tensor_parallel import logits_of_schedule

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

LAYOUTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_parts_of_experts": {"tensor_model_parallel_size": 2},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "dp2_parts_of_experts": {"expert_tensor_parallel_size": 2},
    "tp2_whole_experts": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
HF = {
    "nemotron": ("nemotron_h_experts_scaled", {}),
    "granite": ("granite_experts", {"num_local_experts": 6}),
}
QUICK = ("ep2", "tp2_parts_of_experts")
OVERLAPPED = {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}
IDS = list(range(30))
ENGINE = {
    "buffer_size_gb": 0.02,
    "block_size_tokens": 16,
    "max_requests": 4,
    "max_tokens": 24,
    "enable_chunked_prefill": True,
    "check_invariants": True,
    "collective_timeout_s": 60,
}
PROMPTS = [[i + 3 * j for j in range(length)] for i, length in enumerate((5, 33, 18, 40, 2, 27))]


def logits_of_ids(adopted):
    step = paged_step.Cache(adopted, num_blocks=16).step([(0, IDS)])
    with torch.inference_mode():
        return adopted.logits(adopted.hidden(step), step.ops)


def answers(model):
    """Tokens and log probabilities of greedy and drawn requests, chunked, more of them than fit at once."""
    engine = DynamicInferenceEngine(model, InferenceConfig(**ENGINE))
    wishes = [
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, logprobs=0),
    ]
    requests = zip(PROMPTS, wishes * 3, strict=True)
    outputs = engine.generate(PROMPTS, [params for _, params in requests]) if _leads() else engine.generate([])
    tokens = [output.outputs[0].token_ids for output in outputs]
    scores = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    prompts = [
        probability.logprob
        for output in outputs
        for entry in output.prompt_logprobs or ()
        if entry is not None
        for probability in entry.values()
    ]
    return tokens, torch.tensor(scores + prompts)


def _leads():
    return torch.distributed.get_rank() == 0


def gpt(**settings):
    shared = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
    return tiny_gpt(**EXPERTS | shared | settings, randomize=False)


def on_rank(rank, size, folder, part):
    """part: 0: two layouts that read one of two models each, from Hugging Face tensors and from a checkpoint; 1: these
    layouts with the other model, and all else."""
    for number, (layout, sizes) in enumerate(LAYOUTS.items()):
        quick = layout in QUICK
        if part == 0 and not quick:
            continue
        new_groups(**sizes)
        options = {
            "tensor_parallel": sizes.get("tensor_model_parallel_size", 1),
            "expert_parallel": sizes.get("expert_model_parallel_size", 1),
        }
        if "expert_tensor_parallel_size" in sizes:
            options["expert_tensor_parallel_size"] = sizes["expert_tensor_parallel_size"]
        for place, case in enumerate(HF):
            sources = (case, f"{case}.ckpt")
            if quick and part == 0:
                sources = sources[number : number + 1] if place == number else ()
            elif quick and place == number:
                sources = sources[1 - number : 2 - number]
            for source in sources:
                with names_read() as read:
                    model = build_model(open_source(folder / source), **options)
                if source == case == "nemotron":
                    check_read(read, rank, layout)
                adopted = adopt(model)
                got = logits_of_ids(adopted)
                assert torch.equal(got, logits_of_ids(adopted)), "other bits in the second run"
                got = gathered(got) if options["tensor_parallel"] > 1 else got
                mine, transformers = torch.load(folder / f"{case}.pt")
                torch.testing.assert_close(got[:, :131], mine[:, :131], atol=1e-5, rtol=0, msg=f"{layout} {source}")
                torch.testing.assert_close(got[:, :131], transformers, atol=1e-4, rtol=0)
            if sources:
                same_answers(model, folder / f"{case}.answers.pt")
        if part == 0:
            gpt_layers(folder, **sizes)
            gpt_layers(folder, **sizes, **OVERLAPPED)


def same_answers(model, expected):
    tokens, scores = answers(model)
    if _leads():
        want_tokens, want_scores = torch.load(expected)
        assert tokens == want_tokens, (tokens, want_tokens)
        torch.testing.assert_close(scores, want_scores, atol=1e-5, rtol=0)


def gpt_layers(folder, **sizes):
    with cpu_shim(3):  # a stream of shared experts
        model = gpt(**sizes)
    weights, expected = torch.load(folder / "gpt.pt")
    take_part(model, weights)
    adopted = adopt(model)
    with mock.patch.object(torch.nn.Module, "__call__", side_effect=AssertionError("a module was called")):
        logits = logits_of_schedule(adopted)
    for got, want in zip(logits, expected, strict=True):
        got = gathered(got) if "tensor_model_parallel_size" in sizes else got
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@contextlib.contextmanager
def names_read():
    """The names of the tensors that are read within the block."""
    read, original = set(), SafetensorsReader.read

    def noting(self, name, *args, **kwargs):
        read.add(name)
        return original(self, name, *args, **kwargs)

    with mock.patch.object(SafetensorsReader, "read", noting):
        yield read


def check_read(read, rank, layout):
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    own = {3 * rank, 3 * rank + 1, 3 * rank + 2}
    assert experts == (own if "ep2" in layout else set(range(6)))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_experts_on_two_ranks_give_the_logits_of_one(tmp_path, part):
    """Whole experts here and there, each expert in two parts, both with attention in two parts and without: from
    Hugging Face tensors and from a checkpoint that one rank wrote."""
    model = gpt()
    adopted = adopt(model)
    torch.save((weights_of(model), logits_of_schedule(adopted)), tmp_path / "gpt.pt")
    for case, (name, changes) in HF.items():
        hf = random_model(name, **changes)
        hf.save_pretrained(tmp_path / case)
        with torch.inference_mode():
            want = hf(torch.tensor([IDS]), use_cache=False).logits[0]
        source = open_source(tmp_path / case)
        model = build_model(source)
        save_checkpoint(model, tmp_path / f"{case}.ckpt", description=source.config())
        torch.save((logits_of_ids(adopt(model)), want), tmp_path / f"{case}.pt")
        torch.save(answers(model), tmp_path / f"{case}.answers.pt")
    run_on_ranks(on_rank, 2, tmp_path, part)
