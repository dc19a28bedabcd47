"""Answers prompts with a model on one or several processes; one process needs no torchrun.

    torchrun --nproc-per-node 2 examples/generate.py --model smollm2 --tp 2
    torchrun --nproc-per-node 4 examples/generate.py --tp 2 --pp 2 --prompts-file P.jsonl --output OUT.jsonl
    python examples/generate.py --model smollm2

P.jsonl has {"prompt": "text" or [token ids]} per line. OUT.jsonl has {"prompt", "token_ids", "text", "finish_reason"}
per line, in the same order; without --output these go to standard output. With more processes than tp x pp x ep there
are several replicas, which share the prompts. The engine's options are those of `megatron-infer generate`.
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_infer import DynamicInferenceEngine, SamplingParams
from megatron_infer.cli.config_flags import add_config_options, given
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.distributed.groups import build_groups, check_world
from megatron_infer.engine.metrics.wandb import LOGGER as METRICS_LOGGER
from megatron_infer.errors import ConfigError, InferenceError, ModelError
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source
from megatron_infer.utils.stderr_log import log_to_stderr

PROMPTS = ["The capital of France is", "1, 1, 2, 3, 5, 8,", "Once upon a time there was a"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="an alias, a directory, a .gguf file (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--prompts-file", metavar="P.jsonl", help="default: three built-in prompts")
    parser.add_argument("--output", metavar="OUT.jsonl", help="default: standard output")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    add_config_options(parser)
    return parser.parse_args()


def main() -> int:
    args = options()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check_world(world, args.tp, args.pp, args.ep)
        prompts = PROMPTS if args.prompts_file is None else read_prompts(Path(args.prompts_file))
        run(args, prompts)
    except (InferenceError, NotImplementedError) as error:  # raised on every rank, printed by one
        if rank == 0 or "RankFailure" in type(error).__name__:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace, prompts: list[Any]) -> None:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    device = Device(device_of_rank())
    groups = build_groups(tensor_parallel=args.tp, pipeline_parallel=args.pp, expert_parallel=args.ep)
    source = open_source(args.model)
    plan, dtype = source.config(), choose_dtype(args.dtype, device)
    model = build_model(source, dtype=dtype, device=str(device.torch), pg_collection=groups, expert_parallel=args.ep)
    shape = shape_of(plan, dtype=str(dtype).removeprefix("torch."))
    config = machine_config(
        {"buffer_size_gb": 1.0} | given(args) | {"pg_collection": groups},
        shape,
        is_cuda=device.is_cuda,
        available_bytes=device.available_bytes(),
        tensor_parallel_size=args.tp,
    )
    if config.logging_step_interval and os.environ.get("RANK", "0") == "0":
        log_to_stderr(METRICS_LOGGER)
    engine = DynamicInferenceEngine(
        model, config, tokenizer=tokenizer_of(source), eos_ids=plan.eos_ids, device=str(device.torch), owns_weights=True
    )
    rank_group = engine.rank_group.groups
    mine = prompts[rank_group.dp_rank :: rank_group.dp_size]
    lines = [
        {
            "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids,
            "token_ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in engine.generate(mine, params)
    ]
    write(args.output, in_order(lines, len(prompts), rank_group))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def tokenizer_of(source: Any) -> Any:
    """None for a model without one: prompts must be token ids then, and answers have no text."""
    try:
        return source.tokenizer()
    except ModelError:
        return None


def device_of_rank() -> str:
    """This process's device."""
    if not torch.accelerator.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return f"cuda:{index}"


def read_prompts(path: Path) -> list[Any]:
    """The "prompt" of each line. Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path}:{number}: not {{"prompt": ...}} in JSON: {error!r}') from error
    if not prompts:
        raise ConfigError(f'{path}: no prompts; give {{"prompt": "text"}} per line')
    return prompts


def in_order(lines: list[dict[str, Any]], count: int, rank_group: Any) -> list[dict[str, Any]] | None:
    """On rank 0 the lines of all replicas in prompt order; None elsewhere."""
    if rank_group.dp_size == 1:
        return lines if torch.distributed.get_rank() == 0 else None
    if not rank_group.is_leader:
        return None
    gathered: list[Any] = [None] * rank_group.dp_size
    torch.distributed.all_gather_object(gathered, lines, group=rank_group.dp)
    if torch.distributed.get_rank() != 0:
        return None
    return [gathered[index % rank_group.dp_size][index // rank_group.dp_size] for index in range(count)]


def write(path: str | None, lines: list[dict[str, Any]] | None) -> None:
    if lines is None:
        return
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if path is None:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
