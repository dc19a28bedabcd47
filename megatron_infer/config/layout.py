"""What a model is computed in and on, `RunOptions`, and how many ranks share the work, `Layout`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.config.options import checked, choose, option, options_of
from megatron_infer.errors import ConfigError

DP_ATTENTION_REQUESTS = 8
"""Requests of a rank from which on data-parallel attention is faster, as measured in docs/parallel_ranks.md."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Arguments of `LLM` that are no options of its engine. Raises ConfigError for a wrong value."""

    dtype: str = option("auto", choices=DTYPES, is_common=True)
    """The dtype of weights and activations. auto: chosen for the device."""
    device: str = option("auto", is_common=True)
    """cpu, cuda or cuda:N, and h100, h200 or b200 for `plan --roofline`. auto: a GPU if there is one, else the CPU."""
    threads: int | None = option(None, is_common=True, default_text="default all cores")
    """CPU threads."""

    def __post_init__(self) -> None:
        choose(options_of(RunOptions)["dtype"], self.dtype)
        if self.threads is not None:
            _check_count("threads", self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of ranks."""

    dp: int = option(1, is_common=True)
    """Engines, each a replica."""
    tp: int = option(1, is_common=True)
    """Tensor-parallel ranks of an engine."""
    pp: int = option(1, is_common=True)
    """Pipeline stages of an engine."""
    ep: int = option(1, is_common=True)
    """Expert-parallel ranks of an engine."""

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.dp * self.tp * self.pp * self.ep

    def check(self, names: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError for a number that is none of ranks. names: what an error calls the fields instead."""
        for name, size in asdict(self).items():
            _check_count((names or {}).get(name, name), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoles:
    """Engines that do a part of each request, in the place of `Layout.dp`. Raises ConfigError."""

    prefill: int = option(0, least=0, is_common=True)
    """Engines that compute prompts and draw first tokens. Needs `decode`."""
    decode: int = option(0, least=0, is_common=True)
    """Engines that go on with these requests. Needs `prefill`."""

    def __post_init__(self) -> None:
        for name, one in options_of(EngineRoles).items():
            checked(one, getattr(self, name))
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(f"prefill is {self.prefill} and decode is {self.decode}; give both, or dp in their place")

    def of_engines(self, layout: Layout) -> tuple[ReplicaRole, ...]:
        """The role of each engine."""
        if not self.prefill:
            return (ReplicaRole.BOTH,) * layout.dp
        if layout.dp > 1:
            raise ConfigError(f"prefill and decode are given, and dp is {layout.dp}; leave dp out")
        return (ReplicaRole.PREFILL,) * self.prefill + (ReplicaRole.DECODE,) * self.decode


def dp_attention_pays(max_requests: int) -> bool:
    """What `dp_attention=None` of an engine comes to, by the requests that run on a rank at most."""
    return max_requests >= DP_ATTENTION_REQUESTS


def describe_dp_attention(asked: bool | None, max_requests: int) -> str:
    """What expert-parallel ranks would do with these sizes, in a sentence."""
    pays = "pays" if dp_attention_pays(max_requests) else "does not pay"
    chosen = dp_attention_pays(max_requests) if asked is None else asked
    return (
        f"on several expert-parallel ranks: requests {'of each rank' if chosen else 'shared by all'} "
        f"(dp_attention={asked}); dp_attention {pays}: max_requests is {max_requests:,}, it pays from "
        f"{DP_ATTENTION_REQUESTS} on"
    )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be an integer of at least 1")
