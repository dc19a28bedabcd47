"""transformers as a baseline: its `generate` and its continuous batching, on the same weights, dtype and workload.

`generate` runs fixed batches of `concurrency` prompts in arrival order, left-padded, each to its longest output; tokens
beyond a request's own length do not count. Continuous batching has at most `concurrency` requests, each with its own
length. Both use the attention implementation that is faster in a short trial.
Source: transformers 5.x, GenerationMixin.generate and ContinuousMixin.continuous_batching_context_manager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from pathlib import Path
from typing import Any

import torch

from megatron_infer.cli.bench_workload import CpuClock, RunResult, Workload
from megatron_infer.errors import InferenceError, ModelError

PAGE_SIZE = 32


class TransformersPeer:
    """A transformers model, loaded from the same files as our own model."""

    def __init__(self, path: Path, *, dtype: str, device: str) -> None:
        self.model = load_transformers(path, dtype=dtype, device=device)
        recurrent = "linear_attention" in (getattr(self.model.config, "layer_types", None) or ())
        self.variants = ("generate",) if recurrent else ("generate", "continuous")
        """Ways to generate; continuous batching has no recurrent states."""
        self.attentions = [kind for kind in ("sdpa", "eager") if self._has(kind)]
        """Attention implementations that the model supports."""
        self.attention = dict.fromkeys(self.variants, self.attentions[0])

    def _has(self, attention: str) -> bool:
        try:
            self.model.set_attn_implementation(attention)
        except ValueError:  # a model without attention layers has no sdpa
            return False
        return True

    def choose_attention(self, workload: Workload) -> None:
        """Choose each variant's attention implementation by a trial on the first requests, which also warms up."""
        count = min(len(workload.prompts), workload.concurrency)
        trial = dataclasses.replace(
            workload, prompts=workload.prompts[:count], output_lens=[min(16, n) for n in workload.output_lens[:count]]
        )
        for variant in self.variants:
            seconds = {}
            for attention in self.attentions:
                self.attention[variant] = attention
                seconds[attention] = min(self.run(variant, trial).seconds for _ in range(2))
            self.attention[variant] = min(seconds, key=seconds.__getitem__)

    def run(self, variant: str, workload: Workload) -> RunResult:
        """Run the workload. Raises InferenceError unless every output has the length asked for."""
        self.model.set_attn_implementation(self.attention[variant])
        result = (self._generate if variant == "generate" else self._continuous)(workload)
        result.details["attention"] = self.attention[variant]
        for index, (tokens, wanted) in enumerate(zip(result.outputs, workload.output_lens, strict=True)):
            if len(tokens) != wanted:
                raise InferenceError(f"transformers {variant}: request {index} gave {len(tokens)} tokens, not {wanted}")
        return result

    @torch.inference_mode()
    def _generate(self, workload: Workload) -> RunResult:
        outputs: list[list[int]] = []
        clock = CpuClock.now()
        for first in range(0, len(workload.prompts), workload.concurrency):
            prompts = workload.prompts[first : first + workload.concurrency]
            wanted = workload.output_lens[first : first + workload.concurrency]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
            drawn = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(wanted),
                min_new_tokens=max(wanted),
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            rows = drawn[:, longest:].tolist()
            outputs += [row[:n] for row, n in zip(rows, wanted, strict=True)]
        end = CpuClock.now()
        return RunResult(seconds=end.wall - clock.wall, outputs=outputs, other_load=end.other_load(clock))

    def _continuous(self, workload: Workload) -> RunResult:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(len(p) + n for p, n in zip(workload.prompts, workload.output_lens, strict=True))
        pages = -(-longest // PAGE_SIZE) + 1
        settings = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=pages * workload.concurrency,
            max_batch_tokens=max(512, workload.concurrency),
            max_requests_per_batch=workload.concurrency,
            allow_block_sharing=False,
        )
        generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.output_lens)
        )
        done: dict[str, Any] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings
        ) as manager:
            clock = CpuClock.now()
            order = [
                manager.add_request(prompt, max_new_tokens=wanted, eos_token_id=-1)
                for prompt, wanted in zip(workload.prompts, workload.output_lens, strict=True)
            ]
            while len(done) < len(order):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise InferenceError("transformers' continuous batching stopped before all requests were answered")
            end = CpuClock.now()
        failed = [done[i].error for i in order if done[i].error is not None]
        if failed:
            raise InferenceError(f"transformers' continuous batching failed a request: {failed[0]}")
        return RunResult(
            seconds=end.wall - clock.wall,
            outputs=[done[i].generated_tokens for i in order],
            other_load=end.other_load(clock),
        )


def load_transformers(path: Path, *, dtype: str, device: str) -> Any:
    """The same weights in transformers: a directory, or a .gguf file, which it dequantizes."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError("--vs transformers needs transformers; pip install transformers gguf") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    kind = getattr(torch, dtype)
    load = transformers.AutoModelForCausalLM.from_pretrained
    if (path / "config.json").is_file():
        model = load(str(path), dtype=kind)
    elif path.suffix == ".gguf":
        with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar that has no switch
            model = load(str(path.parent), gguf_file=path.name, dtype=kind)
    else:
        raise ModelError(f"{path}: transformers reads a Hugging Face directory or a .gguf file")
    # The model's own generation defaults (sampling, end of sequence) would change the workload.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.to(device).eval()
