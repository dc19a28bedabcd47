"""What an engine compiles while it is built is all that its requests launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine import build_runner
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.kernels.triton import experts
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.runner.warm_up import launch_kernels
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.triton

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1, "vocab_size": 80}
SIZES |= {"max_sequence_length": 512, "init_method_std": 0.2}
"""Sequences may be so long that decode rows' keys are cut; those of the requests are not."""
TALLER = {"attention": [], "hybrid": [], "experts": [33]}
"""Tokens from which on experts' tiles are taller: of fp32 they never are, but here."""
MIXER = {"mamba_head_dim": 32, "mamba_num_groups": 1}
PLAIN: tuple[dict[str, Any], ...] = (
    {"max_tokens": 2, "temperature": 0.0},
    {"max_tokens": 1, "seed": 5},
    {"max_tokens": 1, "seed": 1, "top_k": 9, "logprobs": 1},
)
EDITS = {"max_tokens": 1, "frequency_penalty": 0.3, "bad_token_ids": [5], "allowed_token_ids": [5, 6, 7]}
EVERYTHING: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"max_tokens": 1, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},),
    ({**EDITS, "temperature": 0.0}, {**EDITS, "seed": 3, "min_p": 0.1, "logprobs": 2}, {"max_tokens": 1, "seed": 2}),
    ({**EDITS, "seed": 3, "return_sampled_logprobs": True, "return_support": True}, {"max_tokens": 1, "top_p": 0.5}),
)


def compiled_as(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel again for: types, and of some arguments whether they are 1 or divide by 16."""
    loose, unaligned = set(), set()
    if (given := getattr(kernel, "kwargs", None)) is not None:  # interpreted
        loose, unaligned = set(given["do_not_specialize"] or ()), set(given["do_not_specialize_on_alignment"] or ())
    else:
        loose = {one.name for one in kernel.params if one.do_not_specialize}
        unaligned = {one.name for one in kernel.params if one.do_not_specialize_on_alignment}

    def kinds() -> Iterator[Any]:
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                yield value.dtype, name in unaligned or value.data_ptr() % 16 == 0
            elif isinstance(value, int):
                yield value.bit_length() > 31, name in loose or (value == 1, value % 16 == 0)
            else:
                yield type(value)

    return kernel.fn.__name__, tuple(kinds()), tuple(sorted(options.items(), key=str))


@pytest.mark.parametrize("kind", ["attention", "hybrid", "experts"])
def test_requests_launch_nothing_that_was_not_compiled_when_the_engine_was_built(kind, device, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    if kind == "experts":
        heights = functools.partial(experts.tile_sizes, dtype=torch.float16)
        monkeypatch.setattr(experts, "tile_sizes", lambda pairs, count, dtype: (heights(pairs, count)[0], 32, 32, 4, 2))
    model = {
        "attention": lambda: tiny_gpt(num_layers=1, **SIZES),
        "hybrid": lambda: tiny_hybrid("ME*", **MIXER, **SIZES),
        "experts": lambda: tiny_gpt(num_layers=1, **EXPERTS, **SIZES),
    }[kind]()
    engine = DynamicInferenceEngine(
        model.to(device),
        InferenceConfig(buffer_size_gb=0.005, block_size_tokens=16, max_requests=4, max_tokens=64, vocab_size=70,
                        enable_chunked_prefill=True),
    )  # fmt: skip
    if kind == "hybrid":
        monkeypatch.setattr(engine.kernels.scan, "_segment", 32)  # a whole one in a prompt
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "is_cuda", True)
        patch.setattr(build_runner, "launch_kernels", lambda runner, *args: calls.append(args))
        parts = inspect(engine)
        build_runner.warm_up(parts.runner, parts.adopted, engine.kernels, engine.device, max_tokens=64)
    assert calls == [(64, TALLER[kind])], "on a GPU it is part of building the engine"
    seen: list[set[Any]] = [set(), set()]
    with listening(lambda _, kernel, grid, args, options: seen[0].add(compiled_as(kernel, args, dict(options)))):
        launch_kernels(inspect(engine).runner, *calls[0])
    assert len(seen[0]) > 8
    assert sum(name == "forbid_kernel" for name, *_ in seen[0]) == 2, "masks of all rows, and of some"
    with listening(lambda _, kernel, grid, args, options: seen[1].add(compiled_as(kernel, args, dict(options)))):
        for requests in (PLAIN, *EVERYTHING):
            for count, wishes in enumerate(requests):
                length = 17 * count + 1 if requests is PLAIN else 2
                engine.add_request([3 + count] * length, SamplingParams(ignore_eos=True, **wishes))
            while engine.has_unfinished():
                engine.step()
    fresh = seen[1] - seen[0]
    assert not fresh, "\n".join(map(str, fresh))
