"""LoRA adapters on SmolLM2: what they cost, and PEFT under transformers."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer import LLM, LoRAConfig, SamplingParams, open_source

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 128, 128
NUM_ADAPTERS = 8


def state_dict(model: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter of a Llama under PEFT's names."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    width, inner = config.hidden_size, config.ffn_hidden_size
    keys = config.kv_channels * config.num_query_groups
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (rows, columns) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.005
    return tensors


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Path:
    """A PEFT directory."""
    folder.mkdir()
    save_file(state_dict(model, rank, seed), folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return torch.randint(1, 40000, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(clock: Clock, llm: LLM, adapters: list[str | None], num_output: int) -> Done:
    """NUM_REQUESTS requests; request i asks for adapters[i % len(adapters)]."""
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(NUM_REQUESTS, NUM_PROMPT, 0)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, adapter=adapters[i % len(adapters)])
        for i in range(NUM_REQUESTS)
    ]
    with clock:
        llm.generate(prompts, params)
    return Done(NUM_REQUESTS * num_output)


def names_of(count: int) -> list[str | None]:
    return [f"a{index}" for index in range(count)]


# ---------------------------------------------------------------------- lora


def load_while_streaming(engine: Any, folders: list[Path]) -> None:
    """Print how long steps of 16 requests take while adapters are loaded, and how long the loads take."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 40000, (NUM_REQUESTS, 16), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    ids = [engine.add_request(prompt, params, stream="delta") for prompt in prompts]

    def step() -> float:
        began = time.perf_counter()
        engine.step()
        return time.perf_counter() - began

    def steps(count: int) -> list[float]:
        return [step() for _ in range(count)]

    steps(20)
    alone = steps(60)
    loading: list[float] = []
    loads: list[float] = []
    installs: list[float] = []
    for number, folder in enumerate(folders):
        name = f"loaded{number}"
        began = time.perf_counter()
        reading = engine.controls.adapters.read(name, folder)
        while not reading.future.done():
            loading.append(step())
        install = time.perf_counter()
        engine.load_adapter(name, reading)
        installs.append(time.perf_counter() - install)
        loads.append(time.perf_counter() - began)
        ids.append(engine.add_request([5], SamplingParams(temperature=0.0, max_tokens=2, adapter=name)))
        loading.append(step() + installs[-1])  # this step writes it into a slot
        alone += steps(10)
    for request_id in ids[:NUM_REQUESTS]:
        engine.abort(request_id)
    usual = statistics.median(alone)
    print(f"a step of {NUM_REQUESTS} requests: median {usual * 1e3:.1f} ms, longest {max(alone) * 1e3:.1f}")
    print(
        f"while {len(folders)} adapters are loaded: median {statistics.median(loading) * 1e3:.1f} ms, longest "
        f"{max(loading) * 1e3:.1f} ({max(loading) / usual:.2f} usual steps); on the engine's thread "
        f"{max(installs) * 1e3:.1f} ms at most; loaded after {statistics.median(loads) * 1e3:.0f} ms, at most "
        f"{max(loads) * 1e3:.0f}"
    )


@contextlib.contextmanager
def lora(args: argparse.Namespace) -> Iterator[list[Measure]]:
    settings: dict[str, Any] = {"buffer_size_gb": 0.5, "max_requests": NUM_REQUESTS, "enable_prefix_caching": False}
    adapters = LoRAConfig(max_loras=NUM_ADAPTERS, max_rank=args.rank)
    plain = LLM("smollm2", config=settings, dtype=args.dtype)
    adapted = LLM("smollm2", config=settings | {"lora": adapters}, dtype=args.dtype)
    seconds = []
    with tempfile.TemporaryDirectory() as root:
        model = adapted.engine.model
        folders = [write_adapter(Path(root) / f"{i}", model, args.rank, i) for i in range(2 * NUM_ADAPTERS)]
        for index in range(NUM_ADAPTERS):
            began = time.perf_counter()
            adapted.engine.load_adapter(f"a{index}", folders[index])
            seconds.append(time.perf_counter() - began)
        shown = statistics.median(seconds) * 1e3, seconds[0] * 1e3, max(seconds[1:]) * 1e3
        print("load_adapter, rank {}: {:.0f} ms; the first {:.0f}, others at most {:.0f}".format(args.rank, *shown))
        load_while_streaming(adapted.engine, folders[NUM_ADAPTERS:])
    variants: dict[str, Variant] = {
        "an engine without adapters": partial(generate, llm=plain, adapters=[None], num_output=NUM_OUTPUT),
        "base requests, 8 adapters loaded": partial(generate, llm=adapted, adapters=[None], num_output=NUM_OUTPUT),
        "one adapter": partial(generate, llm=adapted, adapters=names_of(1), num_output=NUM_OUTPUT),
        "8 adapters": partial(generate, llm=adapted, adapters=names_of(NUM_ADAPTERS), num_output=NUM_OUTPUT),
    }
    yield [Measure(f"{NUM_REQUESTS} requests", "token", variants)]


# ---------------------------------------------------------------------- PEFT

RANK = 16


def peft_model(folders: list[Path], dtype: torch.dtype) -> Any:
    """The same weights under transformers, with the adapters a0, a1, ..."""
    import peft
    import transformers

    path = Path(open_source("smollm2").path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = peft.PeftModel.from_pretrained(load(path.parent, gguf_file=path.name, dtype=dtype), folders[0], "a0")
    for index, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, f"a{index}")
    return model.eval()


@torch.inference_mode()
def compare_logits(folders: list[Path], prompt: list[int]) -> None:
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


@torch.inference_mode()
def generate_by_peft(
    clock: Clock, model: Any, batches: list[tuple[torch.Tensor, str]], num_output: int, **how: Any
) -> Done:
    """Batches of prompts one after the other, each with an adapter."""
    lengths = {"max_new_tokens": num_output, "min_new_tokens": num_output, "do_sample": False, "pad_token_id": 0}
    with clock:
        for ids, adapter in batches:
            model.set_adapter(adapter)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **lengths, **how)
    return Done(NUM_REQUESTS * num_output)


@contextlib.contextmanager
def peft_beside(args: argparse.Namespace) -> Iterator[list[Measure]]:
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    prompts = torch.tensor(random_prompts(NUM_REQUESTS, NUM_PROMPT, 0))
    with tempfile.TemporaryDirectory() as root:
        shape = LLM("smollm2", config={"buffer_size_gb": 0.05}).engine.model
        folders = [write_adapter(Path(root) / f"{i}", shape, RANK, i) for i in range(NUM_ADAPTERS)]
        compare_logits(folders, prompts[0].tolist())
        config = {"buffer_size_gb": 0.5, "max_requests": NUM_REQUESTS, "enable_prefix_caching": False}
        lora = LoRAConfig(max_loras=NUM_ADAPTERS, max_rank=RANK)
        llm = LLM("smollm2", config=config | {"lora": lora}, dtype=args.dtype)
        for index, folder in enumerate(folders):
            llm.engine.load_adapter(f"a{index}", folder)
        theirs = peft_model(folders, getattr(torch, args.dtype))
    in_turns = [(prompts[index::NUM_ADAPTERS], f"a{index}") for index in range(NUM_ADAPTERS)]
    by_row = [f"a{index % NUM_ADAPTERS}" for index in range(NUM_REQUESTS)]
    peft = partial(generate_by_peft, model=theirs, num_output=args.output)
    one: dict[str, Variant] = {
        "megatron_infer": partial(generate, llm=llm, adapters=names_of(1), num_output=args.output),
        "PEFT": partial(peft, batches=[(prompts, "a0")]),
    }
    eight: dict[str, Variant] = {
        "megatron_infer": partial(generate, llm=llm, adapters=names_of(NUM_ADAPTERS), num_output=args.output),
        "PEFT, batches by adapter": partial(peft, batches=in_turns),
        "PEFT, adapter_names": partial(peft, batches=[(prompts, "a0")], adapter_names=by_row),
    }
    yield [Measure("one adapter", "token", one), Measure("8 adapters, two requests each", "token", eight)]


CASES = {
    "lora": Case(
        about="LoRA adapters: 16 requests with none, one and eight.\n\n"
        "Adapters are random PEFT directories of all seven projections; queries, keys and values have an A each.\n"
        "First the seconds of a load, and of the steps of 16 streams during loads.",
        prepare=lora,
        rounds=5,
        options={"rank": 16, "dtype": "bfloat16"},
    ),
    "peft": Case(
        about="LoRA adapters here and in PEFT under transformers: logits, and tokens a second.\n\n"
        "Logits in float32 of every row that the engine draws from, against PEFT's forward of the whole sequence, and\n"
        "how far each is from PEFT's forward in float64 (rotary angles stay float32 in transformers, as here).",
        prepare=peft_beside,
        rounds=2,
        options={"dtype": "bfloat16", "output": 128},
    ),
}
