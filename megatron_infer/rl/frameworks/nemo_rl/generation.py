"""NeMo-RL's GenerationInterface over the engines of the policy's workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface, verify_right_padding

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.rl.frameworks.nemo_rl import workers
from megatron_infer.rl.frameworks.nemo_rl.outputs import start_outputs

EAGER = ("cuda_graph_impl", "inference_cuda_graph_scope")
"""Options of mcore_generation_config whose value "none" means: no CUDA graphs."""
NO_EFFECT = ("parsers", "refit_backend", "materialize_only_last_token_logits")
"""Options of mcore_generation_config for an HTTP server, for weights that are sent, and for a choice made here."""


def engine_config(policy: Mapping[str, Any], options: Mapping[str, Any]) -> InferenceConfig:
    """The engine's config from NeMo-RL's PolicyConfig. options: of InferenceConfig, which go before.

    Raises ConfigError for what has no counterpart.
    """
    generation = policy["generation"]
    if not generation["colocated"]["enabled"]:
        raise ConfigError(
            "policy.generation.colocated.enabled is False: the engine is on the policy's live model; set it to True"
        )
    if generation.get("bad_words"):
        raise ConfigError("policy.generation.bad_words: token ids alone can be kept out here; leave it out")
    given = dict(generation["mcore_generation_config"])
    if given.pop("expose_http_server", False):
        raise ConfigError("mcore_generation_config.expose_http_server is True: there is no server; set it to False")
    if "none" in [given.pop(name, None) for name in EAGER]:
        given["num_cuda_graphs"] = 0
        given.pop("use_cuda_graphs_for_non_decode_steps", None)
    for name in NO_EFFECT:
        given.pop(name, None)
    given["max_sequence_length"] = given.pop("max_model_len")
    for name, value in policy["megatron_cfg"].items():
        if given.pop(name, value) != value:
            raise ConfigError(
                f"mcore_generation_config.{name} is not the trainer's {value!r}: the trainer's model generates; "
                "leave it out"
            )
    return replace(InferenceConfig.from_megatron(given), **options)


class EngineGeneration(GenerationInterface):
    """NeMo-RL's interface. Copies of it in other processes draw from the same engines."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        cluster: Any = None,
        policy: Any = None,
        *,
        processor: Any = None,
        weights_path: Any = None,
        skip_weight_load: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Arguments of MegatronGeneration, which NeMo-RL gives; tokenizer and weights_path are the policy's own.
        options: of InferenceConfig, beyond those of mcore_generation_config. Raises ConfigError."""
        self._config = engine_config(config, options or {})
        if policy is None or cluster is not None or skip_weight_load:
            raise ConfigError("the engine is on a policy's live model: pass policy=, and no cluster")
        if processor is not None:
            raise ConfigError("processor: models here read text alone")
        self.cfg = config["generation"]
        self.weight_synchronizer: Any = None
        """NeMo-RL sets it: its synchronizer of the megatron backend."""
        self._workers = policy.worker_group.workers
        self._leaders = [number for number, is_first in enumerate(self._on_workers(workers.leads)) if is_first]
        self._outputs = start_outputs()
        self._turn = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy begins at a leader of its own: most copies draw one row."""
        vars(self).update(state)
        self._turn = uuid.uuid4().int

    def _on_workers(self, function: Any, *args: Any, **how: Any) -> list[Any]:
        found: list[Any] = ray.get([one.__ray_call__.remote(function, *args, **how) for one in self._workers])
        return found

    # ------------------------------------------------------------------ between training and generation

    def prepare_for_generation(self, *args: Any, tags: Sequence[str] | None = None, **_: Any) -> bool:
        """tags: of NeMo-RL's refit. "weights": nothing yet. Any other: the weights are new."""
        if tags is None or "weights" not in tags:
            self._on_workers(workers.prepare, self._config, is_updated=tags is not None)
        return True

    def finish_generation(self, *args: Any, release_gpu: bool = True, **_: Any) -> bool:
        """Unfinished requests continue after the next `prepare_for_generation`."""
        if release_gpu:
            self._on_workers(workers.call, "training")
        return True

    def invalidate_kv_cache(self) -> bool:
        leaders = [self._workers[number] for number in self._leaders]
        ray.get([one.__ray_call__.remote(workers.call, "reset_prefix_cache") for one in leaders])
        return True

    def blocks_training(self) -> bool:
        return True

    def wake_carries_weight_updates(self) -> bool:
        return True

    def prepare_refit_info(self, state_dict_info: Any) -> None:
        """Nothing has to be known of weights that are not sent."""

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        raise ConfigError("weights are not sent: the policy's live model generates")

    def shutdown(self) -> bool:
        """The engines end with the policy's workers."""
        return True

    # ------------------------------------------------------------------ generation

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Raises InferenceError with a request's error."""
        return self._batch(data, ray.get([self._outputs.get.remote(key) for key, _ in self._submit(data, greedy)]))

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """(row, batch of this row) in the order in which rows finish."""

        async def one(row: int, key: str, leader: int) -> tuple[int, Any]:
            batch = self._batch(data.get_batch(row, 1), [await self._outputs.get.remote(key)])
            batch["gen_leader_worker_idx"] = [leader]
            return row, batch

        submitted = self._submit(data, greedy)
        for done in asyncio.as_completed([one(row, *where) for row, where in enumerate(submitted)]):
            yield await done

    def _submit(self, data: Any, greedy: bool) -> list[tuple[str, int]]:
        """(key, worker) of each row, whose requests the engines have by turns."""
        verify_right_padding(data, pad_value=self.cfg["_pad_token_id"])
        stops = data.get("stop_strings") or [None] * len(data["input_ids"])
        calls: dict[int, list[tuple[str, list[int], SamplingParams]]] = {}
        where: list[tuple[str, int]] = []
        for ids, length, stop in zip(data["input_ids"], data["input_lengths"].tolist(), stops, strict=True):
            key, leader = uuid.uuid4().hex, self._leaders[self._turn % len(self._leaders)]
            self._turn += 1
            where.append((key, leader))
            calls.setdefault(leader, []).append((key, ids[:length].tolist(), self._sampling(greedy, length, stop)))
        for leader, some in calls.items():
            worker = self._workers[leader]
            submitted = worker.__ray_call__.remote(workers.submit, self._outputs, some)
            self._outputs.watch.remote(worker, [key for key, *_ in some], [submitted])  # in a list: not awaited before
        return where

    def _sampling(self, greedy: bool, num_prompt: int, stop: Any) -> SamplingParams:
        cfg = self.cfg
        texts = {*(cfg["stop_strings"] or ()), *([stop] if isinstance(stop, str) else stop or ())}
        return SamplingParams(
            max_tokens=max(1, min(cfg["max_new_tokens"], self._config.max_sequence_length - num_prompt)),
            temperature=0.0 if greedy else cfg["temperature"],
            top_p=1.0 if cfg["top_p"] is None else cfg["top_p"],
            top_k=cfg["top_k"] or 0,
            stop_token_ids=list(cfg["stop_token_ids"] or ()),
            stop=sorted(texts),
            include_stop_str_in_output=True,
            detokenize=bool(texts),
            return_sampled_logprobs=True,
        )

    def _batch(self, data: Any, found: list[dict[str, Any]]) -> Any:
        """NeMo-RL's GenerationOutputSpec: right padded, zeros where a position has no log probability."""
        ids, lengths = data["input_ids"], data["input_lengths"].tolist()
        totals = [length + len(one["token_ids"]) for length, one in zip(lengths, found, strict=True)]
        output_ids = ids.new_full((len(found), max(totals, default=0)), self.cfg["_pad_token_id"])
        logprobs = torch.zeros(output_ids.shape)
        for row, (length, total, one) in enumerate(zip(lengths, totals, found, strict=True)):
            output_ids[row, :length] = ids[row, :length]
            output_ids[row, length:total] = torch.tensor(one["token_ids"])
            logprobs[row, length:total] = torch.tensor(one["logprobs"])
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "logprobs": logprobs,
                "generation_lengths": torch.tensor([len(one["token_ids"]) for one in found]),
                "unpadded_sequence_lengths": torch.tensor(totals),
                "truncated": torch.tensor([one["truncated"] for one in found]),
            }
        )
