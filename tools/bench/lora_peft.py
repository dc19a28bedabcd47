"""LoRA adapters on SmolLM2 beside PEFT under transformers: the same logits, and tokens a second.

    taskset -c 0,1 python tools/bench/lora_peft.py [--rounds 2] [--dtype bfloat16] [--output 128]

1. Logits in float32 of adapters of rank 16 on all seven projections: every row that the engine draws from, of a prefill
   and of decoding steps, against PEFT's forward of the whole sequence, and how far apart they are of the largest logit.
   How far each is from PEFT's forward in float64 says what of that is float32's own rounding (rotary angles stay
   float32 in transformers, as here).
2. Tokens a second of 16 requests, greedy, 128 prompt and OUTPUT new tokens, engines in turns: one adapter; 8 adapters,
   two requests each. PEFT runs 8 adapters one batch after the other, and in one batch by `adapter_names`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from lora import NUM_PROMPT, NUM_REQUESTS, write_adapter

from megatron_infer import LLM, LoRAConfig, SamplingParams, open_source

NUM_ADAPTERS, RANK = 8, 16


def peft_model(folders: list[Path], dtype: torch.dtype) -> Any:
    """The same weights under transformers, with the adapters a0, a1, ..."""
    path = Path(open_source("smollm2").path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = peft.PeftModel.from_pretrained(load(path.parent, gguf_file=path.name, dtype=dtype), folders[0], "a0")
    for index, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, f"a{index}")
    return model.eval()


@torch.inference_mode()
def compare(folders: list[Path], prompt: list[int]) -> None:
    """Print how far logits of both are apart in float32."""
    lora = LoRAConfig(max_loras=2, max_rank=RANK)
    llm = LLM("smollm2", config={"buffer_size_gb": 0.1, "max_requests": 4, "lora": lora}, dtype="float32")
    theirs, double = peft_model(folders[:2], torch.float32), in_float64(peft_model(folders[:2], torch.float32))
    for index in range(2):
        llm.engine.load_adapter(f"a{index}", folders[index])
    for name in (None, "a0", "a1"):
        rows: list[torch.Tensor] = []
        remove = llm.engine.on_logits(lambda logits, _, rows=rows: rows.append(logits.float().clone()) or logits)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, adapter=name)
        tokens = llm.engine.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
        remove()
        ids = torch.tensor([prompt + tokens])
        base = logits_of(theirs, ids, None)[len(prompt) - 1 : -1]
        logits, exact = (logits_of(model, ids, name)[len(prompt) - 1 : -1] for model in (theirs, double))
        ours = torch.cat(rows)[:, : logits.shape[1]]
        apart, largest = (ours - logits).abs().max().item(), logits.abs().max().item()
        print(
            f"float32, adapter {name}, {len(tokens)} rows: at most {apart:.1e} apart, largest logit {largest:.1f} "
            f"(ratio {apart / largest:.1e}); the adapter changes logits by up to {(logits - base).abs().max():.1f}; "
            f"from float64: megatron_infer {(ours - exact).abs().max():.1e}, PEFT {(logits - exact).abs().max():.1e}"
        )


def in_float64(model: Any) -> Any:
    """Also its norms, which transformers computes in float32 whatever the weights are."""
    for module in model.double().modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(torch.nn.functional.rms_norm, normalized_shape=module.weight.shape,
                                     weight=module.weight, eps=module.variance_epsilon)  # fmt: skip
    return model


def logits_of(model: Any, ids: torch.Tensor, adapter: str | None) -> torch.Tensor:
    if adapter is None:
        with model.disable_adapter():
            return model(ids).logits[0]
    model.set_adapter(adapter)
    return model(ids).logits[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 40000, (NUM_REQUESTS, NUM_PROMPT), generator=generator)
    with tempfile.TemporaryDirectory() as root:
        shape = LLM("smollm2", config={"buffer_size_gb": 0.05}).engine.model
        folders = [write_adapter(Path(root) / f"{i}", shape, RANK, i) for i in range(NUM_ADAPTERS)]
        compare(folders, prompts[0].tolist())
        if not args.rounds:
            return
        config = {"buffer_size_gb": 0.5, "max_requests": NUM_REQUESTS, "enable_prefix_caching": False}
        lora = LoRAConfig(max_loras=NUM_ADAPTERS, max_rank=RANK)
        llm = LLM("smollm2", config=config | {"lora": lora}, dtype=args.dtype)
        for index, folder in enumerate(folders):
            llm.engine.load_adapter(f"a{index}", folder)
        theirs = peft_model(folders, getattr(torch, args.dtype))
    names = [f"a{index % NUM_ADAPTERS}" for index in range(NUM_REQUESTS)]

    def ours(adapters: list[str], count: int) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, adapter=one) for one in adapters]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts.tolist()], params)

    @torch.inference_mode()
    def peft_runs(ids: torch.Tensor, adapter: str, count: int, **how: Any) -> None:
        theirs.set_adapter(adapter)
        given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **how)

    def peft_in_turns(count: int) -> None:
        for index in range(NUM_ADAPTERS):
            peft_runs(prompts[index::NUM_ADAPTERS], f"a{index}", count)

    cases: dict[str, Callable[[int], None]] = {
        "one adapter, megatron_infer": lambda count: ours(["a0"] * NUM_REQUESTS, count),
        "one adapter, PEFT": lambda count: peft_runs(prompts, "a0", count),
        "8 adapters, megatron_infer": lambda count: ours(names, count),
        "8 adapters, PEFT, batches by adapter": peft_in_turns,
        "8 adapters, PEFT, adapter_names": lambda count: peft_runs(prompts, "a0", count, adapter_names=names),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.rounds + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run(args.output if number else 4)  # the first one warms up
            if number:
                found[name].append(NUM_REQUESTS * args.output / (time.perf_counter() - began))
                print(f"round {number}, {name}: {found[name][-1]:.1f} tok/s", flush=True)
    for name, speeds in found.items():
        own = found[f"{name.partition(',')[0]}, megatron_infer"]
        ratio = statistics.median(own) / statistics.median(speeds)
        print(
            f"{name:38} {statistics.median(speeds):7.1f} tok/s (rounds {min(speeds):.1f} to {max(speeds):.1f})  "
            f"megatron_infer: {ratio:.2f} times"
        )


if __name__ == "__main__":
    main()
