"""What models take and lose: the memory that `PipelineConfig` estimates, and what rounded weights do to answers.

    python tools/bench/models.py --part memory [--case smollm2] [--dtype float32] [--max-batch-input-tokens 1024]
    python tools/bench/models.py --part rounding [--model smollm2] [--moved] [--tokens 48] [--samples 4] [--json FILE]

memory: the estimate and the peak of a process that uses all of it, on a CPU. Each case runs in its own process: the
model is built, prompts fill the cache, and the peak of the resident set is read, less what the imports took. Weights of
the hybrid and of the expert model are random.

rounding: log probabilities and greedy choices with weight_dtype=int8 and int4, next to what bfloat16 does. Two kinds of
text are scored by engines that differ in one thing: passages of this repository's documentation, and the model's own
answers to questions, drawn at temperature 1 by an int8 engine, as a rollout would. A difference is one of log
probabilities of a given token; `same choice` counts positions whose likeliest token is the same. With --moved all
engines have other weights, which are not those of a 4-bit file: each is moved by up to half a step of its block.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.utils.child_process import run

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------------- memory

COMMON = {
    "vocab_size": 32000, "hidden_size": 768, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any] | None] = {
    "smollm2": None,
    "hybrid": COMMON
    | {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "intermediate_size": 2048,
        "num_hidden_layers": 12, "attn_layer_indices": [5, 11], "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64, "mamba_expand": 2, "mamba_d_conv": 4,
    },
    "experts": COMMON
    | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "head_dim": 64,
        "intermediate_size": 2048, "ssm_state_size": 64, "mamba_num_heads": 24, "mamba_head_dim": 64, "n_groups": 1,
        "chunk_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 1024, "hybrid_override_pattern": "*E*E*E*E*E",
        "num_hidden_layers": 10, "mlp_hidden_act": "relu2",
    },
}  # fmt: skip
MIB = 1 << 20


def measured_case(case: str, dtype: str, max_tokens: int) -> dict[str, float]:
    """Figures of one case, in MiB."""
    from megatron_infer.models.loading.build_model import build_model
    from megatron_infer.pipelines import PipelineConfig
    from megatron_infer.utils.process_memory import give_back

    folder = tempfile.mkdtemp()
    described = CASES[case]
    if described is not None:
        (Path(folder) / "config.json").write_text(json.dumps(described | {"torch_dtype": dtype}), encoding="utf-8")
    config = PipelineConfig(
        model_path=case if described is None else folder,
        quantization_encoding=dtype,
        max_batch_input_tokens=max_tokens,
        max_length=1024,
        max_batch_size=8,
        enable_prefix_caching=False,
        kvcache_ce_watermark=1.0,
    )
    resolved = config.resolved
    torch.zeros(256, 256) @ torch.zeros(256, 256)
    give_back()
    before = _process_bytes("VmRSS")
    if described is None:
        engine = LLM(**resolved.llm, config=resolved.engine).engine
    else:
        assert resolved.description is not None
        model = build_model(resolved.description, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        engine = DynamicInferenceEngine(model, resolved.engine, owns_weights=True)
    loaded = _process_bytes("VmHWM") - before
    resting = _process_bytes("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")
    sizes, vocab = engine.sizes, engine.shape.vocab_size
    per_row = min(sizes.num_usable_blocks // sizes.max_requests * sizes.block_size, sizes.max_prompt_tokens) - 8
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab, (per_row,), generator=generator).tolist() for _ in range(sizes.max_requests)]
    engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    estimate = resolved.estimate
    assert estimate is not None
    measured = _process_bytes("VmHWM") - before
    return {
        "weights": estimate.weights / MIB,
        "activations": estimate.activations / MIB,
        "cache": estimate.cache / MIB,
        "estimate": estimate.total / MIB,
        "load peak": loaded / MIB,
        "resting": resting / MIB,
        "peak": measured / MIB,
        "ratio": estimate.total / measured,
    }


def _process_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.child:
        print(json.dumps(measured_case(args.case[0], args.dtype, args.max_batch_input_tokens)))
        return []
    columns = ("weights", "activations", "cache", "estimate", "load peak", "resting", "peak", "ratio")
    print(f"{'MiB':10}" + "".join(f"{name:>13}" for name in columns))
    report = []
    for case in args.case or CASES:
        tokens = str(args.max_batch_input_tokens)
        words = ["--part", "memory", "--child", "--case", case, "--dtype", args.dtype]
        done = run([sys.executable, __file__, *words, "--max-batch-input-tokens", tokens])
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{case:10}" + "".join(f"{found[name]:13,.2f}" for name in columns), flush=True)
        report.append({"case": case, **found})
    return report


# ---------------------------------------------------------------------- rounding

PASSAGE = 256
"""Tokens of a passage."""
PAGES = ("rl.md", "server.md", "suspend_resume.md", "metrics.md", "parallel.md", "security.md", "lora.md", "clients.md")
DTYPES = ("float32", "bfloat16")
ENGINES = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8, float32": ("float32", "int8"),
    "int8, bfloat16": ("bfloat16", "int8"),
    "int4, float32": ("float32", "int4"),
    "int4, bfloat16": ("bfloat16", "int4"),
}
"""Name -> (dtype, weight_dtype)."""
DRAWS = "int8, bfloat16"
"""The engine that answers the questions."""
PAIRS = [("float32", "bfloat16"), *((dtype, f"{name}, {dtype}") for name in ("int8", "int4") for dtype in DTYPES)]
BLOCK = 32
Scores = list[tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def move_weights(llm: LLM) -> None:
    generator = torch.Generator().manual_seed(0)
    llm.engine.weights.unpack()
    for weight in llm.engine.model.parameters():
        if weight.ndim == 2:
            blocks = weight.float().unflatten(1, (-1, BLOCK))
            step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
            moved = blocks + step * (torch.rand(blocks.shape, generator=generator) - 0.5)
            weight.copy_(moved.flatten(1))
    llm.engine.refresh_weights()


def load(model: str, name: str, *, moved: bool) -> LLM:
    dtype, weight_dtype = ENGINES[name]
    config = InferenceConfig(
        weight_dtype=weight_dtype, buffer_size_gb=0.25, max_sequence_length=1024, max_tokens=1024, max_requests=32
    )
    llm = LLM(model, dtype=dtype, config=config)
    if moved:
        move_weights(llm)
    return llm


def texts(llm: LLM, tokens: int, samples: int) -> dict[str, list[tuple[list[int], int]]]:
    """Kind -> (token ids, first one that is scored) of each text."""
    passages = []
    for page in PAGES:
        ids = llm.tokenizer.encode((ROOT / "docs" / page).read_text(encoding="utf-8"))
        passages += [(ids[at : at + PASSAGE], 1) for at in (0, PASSAGE)]
    lines = (ROOT / "tools/bench/speculative_chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines[:16]]
    outputs = llm.chat(chats, SamplingParams(n=samples, max_tokens=tokens, temperature=1.0, seed=1))
    answers = [
        (out.prompt_token_ids + one.token_ids, len(out.prompt_token_ids)) for out in outputs for one in out.outputs
    ]
    return {"documentation": passages, "own answers": answers}


def score(llm: LLM, found: list[tuple[list[int], int]]) -> Scores:
    """(log probabilities of the given tokens, likeliest tokens) of each text."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scores = []
    for (ids, first), output in zip(found, llm.generate([ids for ids, _ in found], params), strict=True):
        rows = output.prompt_logprobs[first:]
        given = [row[token].logprob for row, token in zip(rows, ids[first:], strict=True)]
        best = [min(row, key=lambda token, row=row: row[token].rank) for row in rows]
        scores.append((torch.tensor(given), torch.tensor(best)))
    return scores


def compare(one: Scores, other: Scores) -> dict[str, float]:
    a, b = (torch.cat([given for given, _ in scores]) for scores in (one, other))
    same = torch.cat([x == y for (_, x), (_, y) in zip(one, other, strict=True)]).double().mean()
    difference = (a - b).abs()
    return {
        "tokens": len(a),
        "mean": float(difference.mean()),
        "median": float(difference.median()),
        "largest": float(difference.max()),
        "perplexity": float((-a.mean()).exp()),
        "its perplexity": float((-b.mean()).exp()),
        "kl_k3": float(((a - b).exp() - 1 - (a - b)).mean()),
        "same choice": float(same),
    }


def rounding(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[list[int], int]]] = {}
    scores: dict[str, dict[str, Scores]] = {}
    for name in (DRAWS, *(name for name in ENGINES if name != DRAWS)):
        llm = load(args.model, name, moved=args.moved)
        found = found or texts(llm, args.tokens, args.samples)
        scores[name] = {kind: score(llm, of_kind) for kind, of_kind in found.items()}
    report: list[dict[str, Any]] = []
    print("| text | tokens | engines | perplexity | mean | median | largest | KL (k3) | same choice |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in found:
        for one, other in PAIRS:
            row = compare(scores[one][kind], scores[other][kind])
            report.append({"text": kind, "engines": [one, other], **row})
            print(
                f"| {kind} | {row['tokens']:,} | {one} and {other} "
                f"| {row['perplexity']:.3f} -> {row['its perplexity']:.3f} "
                f"| {row['mean']:.4f} | {row['median']:.4f} | {row['largest']:.2f} | {row['kl_k3']:.5f} "
                f"| {row['same choice']:.1%} |",
                flush=True,
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["memory", "rounding"], required=True)
    parser.add_argument("--case", action="append", choices=CASES, help="of memory; default: all")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of memory")
    parser.add_argument("--max-batch-input-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="smollm2", help="of rounding")
    parser.add_argument("--moved", action="store_true", help="weights that are not those of a 4-bit file")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--samples", type=int, default=4, help="answers to each of 16 questions")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {"memory": memory, "rounding": rounding}[args.part](args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
