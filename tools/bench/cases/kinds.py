"""Decode steps of latent attention, delta nets and experts, next to the same steps of transformers."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cases.case import Case, Clock, Done, Measure
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source

SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True, "head_dim": 64,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 8,
        },
    ),
    "delta": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "experts": ("Qwen3MoeConfig", EXPERTS),
}  # fmt: skip
"""Kind -> transformers' config and what it adds to SIZES: DeepSeek-V3 without experts, Qwen3.5, Qwen3-MoE."""
STEADY = 2


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(10, 2000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ours(clock: Clock, engine: DynamicInferenceEngine, args: argparse.Namespace) -> Done:
    params = SamplingParams(max_tokens=args.steps + STEADY + 4, temperature=0.0, ignore_eos=True, detokenize=False)
    for number in range(args.rows):
        engine.add_request(random_ids(args.context, number), params)
    for _ in range(STEADY):
        engine.step()
    with clock:
        for _ in range(args.steps):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    return Done(args.steps)


def theirs(clock: Clock, model: Any, args: argparse.Namespace) -> Done:
    ids = torch.tensor([random_ids(args.context, number) for number in range(args.rows)])
    with torch.inference_mode():
        out = model(ids, use_cache=True)
        for step in range(STEADY + args.steps):
            ids = out.logits[:, -1:].argmax(-1)
            if step < STEADY:
                out = model(ids, past_key_values=out.past_key_values, use_cache=True)
                continue
            with clock:
                out = model(ids, past_key_values=out.past_key_values, use_cache=True)
                out.logits[:, -1].argmax(-1).tolist()
    return Done(args.steps)


@contextlib.contextmanager
def kinds(args: argparse.Namespace) -> Iterator[list[Measure]]:
    import transformers

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype, measures = getattr(torch, args.dtype), []
    for kind in args.kinds.split():
        name, own = KINDS[kind]
        config = getattr(transformers, name)(**SIZES | own, dtype=dtype)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            live = build_model(open_source(str(Path(folder))), dtype=dtype)
        sizes = {"buffer_size_gb": 0.5, "max_requests": args.rows, "max_tokens": 2048, "max_sequence_length": 1024}
        engine = DynamicInferenceEngine(live, InferenceConfig(**sizes), owns_weights=True)
        variants = {
            f"transformers {transformers.__version__}": partial(theirs, model=model, args=args),
            "megatron_infer": partial(ours, engine=engine, args=args),
        }
        measures.append(Measure(f"{kind}, decode of {args.rows} rows", "step", variants))
    yield measures


CASES = {
    "kinds": Case(
        about="Decode steps of latent attention, delta nets and experts, next to the same steps of transformers.\n"
        "--kinds: some of " + ", ".join(KINDS) + ".",
        prepare=kinds,
        rounds=5,
        options={
            "kinds": " ".join(KINDS),
            "rows": 16,
            "context": 128,
            "steps": 12,
            "dtype": "bfloat16",
            "threads": 2,
        },
    ),
}
