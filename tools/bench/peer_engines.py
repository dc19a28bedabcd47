"""A peer engine of peers.py: runs in the peer's own environment, so it imports nothing of this package.

    PYTHON peer_engines.py SETTINGS      (JSON; then a workload in each line of standard input)

The first line of output has the engine's version and how long it took to load, every further one the seconds of a
workload and the tokens of each answer, or why the engine cannot run it: all of it JSON.
Each engine computes in the dtype it is given, keys and values included, and draws greedily unless a workload has
several samples of a prompt: these are drawn at temperature 1, with the log probability of each token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Unsupported(Exception):
    """The engine, or its adapter, cannot run a workload."""


def keep_in_flight(work: dict[str, Any], add: Callable[[int], None], step: Callable[[], dict[int, Any]]) -> list[Any]:
    """Run a workload on an engine that is driven step by step -> the results of `step`, in the order of the prompts.

    add(i) hands in request i; step() computes and returns {i: result} of those that have ended.
    """
    count, added = len(work["prompts"]), 0
    done: dict[int, Any] = {}
    while len(done) < count:
        while added < count and added - len(done) < work["concurrency"]:
            add(added)
            added += 1
        done |= step()
    return [done[index] for index in range(count)]


class VLLM:
    """vLLM's engine in this process, compiled, with its own defaults; the prefix cache is emptied before each run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[: settings["threads"]]))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["kv_gib"])
        import vllm

        self._vllm = vllm
        self.version = vllm.__version__
        self._engine = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_length"],
            max_num_seqs=settings["max_rows"],
            skip_tokenizer_init=True,
        ).llm_engine
        self._num_added = 0

    def run(self, work: dict[str, Any]) -> list[list[int]]:
        samples = work["num_samples"]
        self._engine.reset_prefix_cache()
        base = self._num_added
        self._num_added += len(work["prompts"])

        def add(index: int) -> None:
            params = self._vllm.SamplingParams(
                n=samples,
                temperature=0.0 if samples == 1 else 1.0,
                logprobs=None if samples == 1 else 0,
                max_tokens=work["output_lens"][index],
                ignore_eos=True,
                detokenize=False,
                output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(str(base + index), {"prompt_token_ids": work["prompts"][index]}, params)

        def step() -> dict[int, Any]:
            return {int(one.request_id) - base: one.outputs for one in self._engine.step() if one.finished}

        return [list(one.token_ids) for outputs in keep_in_flight(work, add, step) for one in outputs]


def preload_vllm() -> None:
    """Start again with the OpenMP and malloc that vLLM preloads into its own worker processes."""
    import importlib.util

    if os.environ.get("LD_PRELOAD"):
        return
    specs = [importlib.util.find_spec(name) for name in ("vllm", "torch")]
    packages = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    patterns = ("libs/libtcmalloc*.so*", "lib/libgomp*.so*", "../torch.libs/libgomp*.so*")
    found = [str(path) for folder in packages for pattern in patterns for path in sorted(folder.glob(pattern))[:1]]
    if found:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class OpenVINO:
    """OpenVINO GenAI's continuous batching, of a model that optimum-intel converts at start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai
        from optimum.exporters.openvino import main_export

        half = settings["dtype"] != "float32"
        target = Path(settings["scratch"]) / "openvino"
        export = {"task": "text-generation-with-past", "convert_tokenizer": True}
        main_export(settings["model"], target, **export, ov_config=_weights("fp16" if half else "fp32"))
        self._genai = openvino_genai
        self.version = openvino_genai.__version__.partition("-")[0]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_gib"]
        scheduler.max_num_seqs = settings["max_rows"]
        scheduler.max_num_batched_tokens = max(512, settings["max_rows"])
        # On a CPU without products of bfloat16 it refuses keys and values in it, and computes in float32.
        can_half = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if half and can_half else "f32"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(target),
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "INFERENCE_NUM_THREADS": settings["threads"],
            },
        )
        self._num_added = 0

    def run(self, work: dict[str, Any]) -> list[list[int]]:
        import numpy
        import openvino

        samples = work["num_samples"]
        handles: dict[int, Any] = {}

        def add(index: int) -> None:
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = work["output_lens"][index], True
            config.do_sample, config.num_return_sequences = samples > 1, samples
            config.logprobs = int(samples > 1)
            ids = openvino.Tensor(numpy.array([work["prompts"][index]], dtype=numpy.int64))
            handles[index] = self._pipeline.add_request(self._num_added, ids, config)
            self._num_added += 1

        def step() -> dict[int, Any]:
            self._pipeline.step()
            running = self._genai.GenerationStatus.RUNNING
            ended = [index for index, handle in handles.items() if handle.get_status() != running]
            return {index: handles.pop(index).read_all() for index in ended}

        return [list(one.generated_ids) for outputs in keep_in_flight(work, add, step) for one in outputs]


def _weights(kind: str) -> Any:
    from optimum.intel import OVConfig

    return OVConfig(dtype=kind)


class LlamaCpp:
    """llama.cpp by the C functions of llama-cpp-python, with continuous batching here: a step is one token of every
    running sequence and prompt tokens in what remains of a batch."""

    BATCH = 2048

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self.version = llama_cpp.__version__
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            settings[settings["engine"]].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings["max_rows"] * settings["max_length"]
        params.n_seq_max = settings["max_rows"]
        params.n_batch, params.n_ubatch = self.BATCH, 512
        params.n_threads = params.n_threads_batch = settings["threads"]
        if settings["dtype"] == "float32":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not model or not self._context:
            raise RuntimeError("llama.cpp could not load the model")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def run(self, work: dict[str, Any]) -> list[list[int]]:
        if work["num_samples"] > 1:
            raise Unsupported("the adapter draws greedily")
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        free = list(range(work["concurrency"]))
        running: dict[int, dict[str, Any]] = {}

        def add(index: int) -> None:
            prompt = work["prompts"][index]
            running[index] = {"row": free.pop(), "todo": prompt, "position": 0, "drawn": []}

        def step() -> dict[int, Any]:
            for one, token in self._decode(list(running.values())):
                one["drawn"].append(token)
                one["todo"] = [token]
            ended = [index for index, one in running.items() if len(one["drawn"]) == work["output_lens"][index]]
            for index in ended:
                free.append(running[index]["row"])
                self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), free[-1], -1, -1)
            return {index: running.pop(index)["drawn"] for index in ended}

        return keep_in_flight(work, add, step)

    def _decode(self, sequences: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
        """Compute one batch -> the sequences whose last token was in it, each with its next token."""
        import numpy

        batch, size = self._batch, 0
        draws = []
        for one in sorted(sequences, key=lambda one: not one["drawn"]):
            part = one["todo"][: self.BATCH - size]
            for offset, token in enumerate(part):
                batch.token[size], batch.pos[size] = token, one["position"] + offset
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, one["row"]
                batch.logits[size] = 0
                size += 1
            one["todo"] = one["todo"][len(part) :]
            one["position"] += len(part)
            if part and not one["todo"]:
                batch.logits[size - 1] = 1
                draws.append(one)
        batch.n_tokens = size
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        if not draws:
            return []
        logits = self._lib.llama_get_logits(self._context)
        rows = numpy.ctypeslib.as_array(logits, shape=(len(draws), self._vocab))
        return list(zip(draws, rows.argmax(axis=1).tolist(), strict=True))


class Transformers:
    """transformers' `generate`: batches of `concurrency` prompts in their order, left-padded, each to its longest
    answer; tokens beyond a request's own length do not count. The warm-up chooses a batch size's faster attention."""

    @property
    def drafting(self) -> Mapping[str, Any]:
        """Arguments of `generate` that make it draft."""
        return {}

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if settings["device"] == "cpu":
            torch.set_num_threads(settings["threads"])
        self.version = transformers.__version__
        self.model = self.load(settings["model"], settings)
        # The model's own generation defaults (sampling, end of sequence) would change the workload.
        self.model.generation_config = transformers.GenerationConfig(do_sample=False)
        self._attention: dict[int, str] = {}
        """Batch size -> the attention that its warm-up chose."""

    @staticmethod
    def load(path: str, settings: dict[str, Any]) -> Any:
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings["dtype"]))
        return model.to(settings["device"]).eval()

    def warm_up(self, work: dict[str, Any]) -> None:
        seconds = {}
        for kind in ("sdpa", "eager"):
            try:
                self.model.set_attn_implementation(kind)
            except ValueError:  # a model without attention layers has no sdpa
                continue
            self._attention[work["concurrency"]] = kind
            for _ in range(2):
                started = time.perf_counter()
                self.run(work)
                seconds[kind] = time.perf_counter() - started
        self._attention[work["concurrency"]] = min(seconds, key=seconds.__getitem__)

    def run(self, work: dict[str, Any]) -> list[list[int]]:
        import torch

        if work["num_samples"] > 1:
            raise Unsupported("generate gives no log probabilities without the logits of all steps")
        self.model.set_attn_implementation(self._attention[work["concurrency"]])
        outputs: list[list[int]] = []
        for first in range(0, len(work["prompts"]), work["concurrency"]):
            prompts = work["prompts"][first : first + work["concurrency"]]
            wanted = work["output_lens"][first : first + work["concurrency"]]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
            lengths = {"max_new_tokens": max(wanted), "min_new_tokens": max(wanted)}
            with torch.inference_mode():
                drawn = self.model.generate(
                    ids, attention_mask=mask, **lengths, **self.drafting, pad_token_id=0, eos_token_id=None
                )
            rows = drawn[:, longest:].tolist()
            outputs += [row[:n] for row, n in zip(rows, wanted, strict=True)]
        return outputs


class TransformersLookup(Transformers):
    """The same with `prompt_lookup_num_tokens`: it drafts what followed the last tokens where they stood before."""

    @property
    def drafting(self) -> Mapping[str, Any]:
        return {"prompt_lookup_num_tokens": 10}  # the number in transformers' documentation

    def run(self, work: dict[str, Any]) -> list[list[int]]:
        if work["concurrency"] > 1:
            raise Unsupported("generate drafts for one prompt at a time")
        return super().run(work)


class TransformersAssisted(TransformersLookup):
    """The same with `assistant_model`: another model drafts, or the model itself where none is given."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._assistant = self.load(settings.get("assistant", settings["model"]), settings)

    @property
    def drafting(self) -> Mapping[str, Any]:
        return {"assistant_model": self._assistant}


ENGINES: dict[str, Any] = {
    "vllm": VLLM,
    "openvino": OpenVINO,
    "llama.cpp": LlamaCpp,
    "llama.cpp-q8_0": LlamaCpp,
    "llama.cpp-q4_0": LlamaCpp,
    "transformers": Transformers,
    "transformers-lookup": TransformersLookup,
    "transformers-assisted": TransformersAssisted,
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings["engine"] == "vllm":
        preload_vllm()
    # Standard output is for answers; what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    started = time.perf_counter()
    engine = ENGINES[settings["engine"]](settings)
    answer(version=engine.version, start_s=time.perf_counter() - started)
    for line in sys.stdin:
        work = json.loads(line)
        try:
            if work["is_warm_up"]:
                getattr(engine, "warm_up", engine.run)(work)
                answer()
                continue
            started = time.perf_counter()
            outputs = engine.run(work)
            answer(seconds=time.perf_counter() - started, outputs=outputs)
        except Unsupported as error:
            answer(unsupported=str(error))


if __name__ == "__main__":
    main()
