"""Options of a coordinator: `CoordinatorOptions`. Importing this module needs neither torch nor pyzmq."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy
from megatron_infer.config.options import CHECKED, checked, choose, option, options_of
from megatron_infer.errors import ConfigError

MAX_STEP_S = 600.0
"""Seconds in one step after which an engine counts as hanging."""
MAX_MESSAGE = 16 << 20
"""Bytes of one message: a prompt of a million tokens with room to spare."""
MAX_HEARTBEAT_S = 0.5


class ReplicaRole(str, Enum):
    """What a replica does of a request."""

    BOTH = "prefill_and_decode"
    PREFILL = "prefill_only"
    """It computes prompts, draws first tokens and hands the requests out."""
    DECODE = "decode_only"
    """It goes on with requests that others have begun, and computes short prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """Options of a coordinator; an invalid value raises ConfigError."""

    policy: PrefixCachingCoordinatorPolicy | None = option(
        None, flag="prefix-caching-coordinator-policy", default_text="default the first replica's", is_common=True
    )
    """How requests are routed."""
    alpha: float | None = option(
        None,
        least=0,
        most=1,
        flag="prefix-caching-routing-alpha",
        default_text="default the first replica's, or 1.0 with a policy given here",
        is_common=True,
    )
    """Weight of cached prefixes in the prefix policies: a replica's score is alpha * the share of the prompt it has
    cached + (1 - alpha) * its share of free rows."""
    key: bytes | None = option(None, flag=None, is_secret=True)
    """Shared secret that every peer must prove. None: the user's own, or none at a private address."""
    max_queue: int = option(4096, least=1, is_common=True)
    """Most requests that wait for a replica. One caller has seven eighths of them at most. Further requests are
    refused."""
    max_attempts: int = option(4, least=1)
    """Most replicas that a request is sent to: the request may be what makes them fail."""
    timeout_s: float = option(5.0, above=0, is_common=True)
    """Seconds of silence after which a replica counts as dead; its requests go to others."""
    client_timeout_s: float = option(60.0, above=0)
    """Seconds of silence after which a client counts as dead, and its requests are aborted. A client that is gone shows
    at once by its broken connection. A client that is only busy finds its outputs when it reads again."""
    step_timeout_s: float | None = option(MAX_STEP_S, above=0)
    """Seconds in one step after which an engine counts as dead, despite its heartbeat. None: never."""
    max_message: int = option(MAX_MESSAGE, least=1, flag=None)
    """Most bytes of a message."""
    role_min_prompt_tokens: int = option(128, least=0)
    """Prompts with fewer tokens that its cache does not have stay on the replica that decodes them, in place of a
    prefill_only replica."""
    seed: int = option(0, is_common=True)
    """Requests without a seed get one derived from this, in the order of arrival."""

    def __post_init__(self) -> None:
        for name, one in options_of(CoordinatorOptions).items():
            if one.kind in CHECKED:
                object.__setattr__(self, name, checked(one, getattr(self, name)))
        if self.policy is not None:
            object.__setattr__(self, "policy", choose(options_of(CoordinatorOptions)["policy"], self.policy))
        if self.client_timeout_s < self.timeout_s:
            raise ConfigError(f"client_timeout_s is {self.client_timeout_s}, less than timeout_s, {self.timeout_s}")
        if self.key is not None and not self.key:
            raise ConfigError("the key is empty; None means the user's own")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: several fit into timeout_s."""
        return min(MAX_HEARTBEAT_S, self.timeout_s / 4)
