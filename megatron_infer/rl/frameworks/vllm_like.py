"""An LLM with the methods that colocated training loops call on vLLM's.

llm.sleep(level=2)                          releases memory for the trainer
llm.wake_up(tags=["weights"])
llm.update_weights(named_tensors)           in place; derived copies are rebuilt once, cached prefixes not matched again
llm.wake_up(tags=["kv_cache"])
llm.generate(prompts, params, use_tqdm=False)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.lifecycle_commands import GRAPHS, KV_CACHE, WEIGHTS
from megatron_infer.engine.llm import LLM
from megatron_infer.engine.requests.input_processor import Prompt
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, WrongState, unknown_name
from megatron_infer.outputs.request_output import OnError, RequestOutput
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates import apply

LEVELS = (0, 1, 2)
TAGS = {"weights": {WEIGHTS}, "kv_cache": {KV_CACHE, GRAPHS}}
"""vLLM's tag -> the engine's tags: captured graphs are released and restored with the cache."""


class ColocateLLM(LLM):
    """`LLM` that sleeps while a trainer runs, and takes new weights.

    Unfinished requests survive every level: keys and values that were dropped are recomputed.
    """

    _needs_weights = False

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> None:
        """Stop generating and release memory.

        level 0: pause, with all memory kept; 1: drop the cache, offload weights to the host (if they are on a device);
        2: as 1, and the weights are invalid: update_weights() is needed before the next generate().
        tags: of "weights" and "kv_cache", for levels 1 and 2; None: both.
        """
        if level not in LEVELS:
            raise ConfigError(f"sleep level is {level!r}, it is one of 0 (pause), 1 (free memory), 2 (weights too)")
        if level == 0:
            if tags is not None:
                raise ConfigError("sleep(level=0) frees nothing; leave out tags, or take level 1")
            if self.engine.state is EngineState.RUNNING:
                self.engine.pause()
            return
        wanted = _tags(tags)
        self.engine.suspend(KVCacheManagementMode.RECOMPUTE, wanted)
        self._needs_weights |= level == 2 and (wanted is None or WEIGHTS in wanted)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore memory: all of it, or `tags` now and the others later. generate() works once all is restored."""
        wanted = _tags(tags)
        if self.engine.state is EngineState.SUSPENDED:
            self.engine.resume(wanted)
        if self.engine.state is EngineState.PAUSED:
            self.engine.unpause()

    @property
    def is_sleeping(self) -> bool:
        return self.engine.state is not EngineState.RUNNING

    def update_weights(self, weights: Any, *, version: int | None = None) -> UpdateReport:
        """Write weights into the model: (name, tensor) pairs under Hugging Face or megatron-core names, a mapping, or a
        path. An incomplete update raises WeightUpdateError. Allowed in any state except with the weights offloaded to
        the host."""
        report = apply(self.engine, weights, version=version)
        self._needs_weights = False
        return report

    def load_weights(self, weights: Any) -> None:
        """`update_weights` under the name that vLLM's model runner has."""
        self.update_weights(weights)

    def reset_prefix_cache(self) -> bool:
        """Later prompts match no prefix computed before. A weight update has the same effect."""
        self.engine.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Like `LLM.generate`. Raises WrongState while asleep."""
        if self._needs_weights:
            raise WrongState(
                "generate() after sleep(level=2), which drops the weights; call update_weights() first",
                state=self.engine.state.value,
            )
        return super().generate(prompts, sampling_params, use_tqdm=use_tqdm, on_error=on_error)


def _tags(tags: Iterable[str] | None) -> set[str] | None:
    if tags is None:
        return None
    wanted: set[str] = set()
    for tag in [tags] if isinstance(tags, str) else tags:
        if tag not in TAGS:
            raise ConfigError(f"{unknown_name('tag', str(tag), list(TAGS))}; tags are {', '.join(TAGS)}")
        wanted |= TAGS[tag]
    return wanted
