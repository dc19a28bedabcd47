"""The prompts that callers give to the ranks of one engine, which serves those of its leader.

leader        digests of the prompts that it reads  --Outbox, in a call that travels anyway-->  other ranks
other ranks   read as many of their own and compare --report of their next call-->  PromptsDiffer on all ranks
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.requests.input_processor import is_single_prompt

Params = SamplingParams | Sequence[SamplingParams] | None


class GivenPrompts:
    """The prompts of one caller on this rank, with their sampling parameters, read only as far as the leader reads."""

    def __init__(self, prompts: Any, params: Params) -> None:
        """prompts: one, or an iterable of them; None: no prompts. params: one for all, or one for each."""
        self._digests = digests_of(() if prompts is None else prompts, params)
        self._num_read = 0

    def difference(self, leaders: Sequence[str], *, is_all: bool) -> str:
        """What is not as the leader's next prompts; "" if nothing is, or if the caller has given no prompt at all.

        leaders: their digests. is_all: the leader has no prompts after them.
        """
        for digest in leaders:
            own = next(self._digests, None)
            if own is None and not self._num_read:
                return ""
            if own is None:
                return f"prompt {self._num_read} is missing"
            if own != digest:
                return f"prompt {self._num_read}, or its sampling parameters, are others"
            self._num_read += 1
        if is_all and next(self._digests, None) is not None:
            return f"prompt {self._num_read} is one that rank 0 does not have"
        return ""


def digests_of(prompts: Any, params: Params) -> Iterator[str]:
    """16 hex digits for each prompt with its parameters, equal in all processes for equal ones."""
    each = [params] if params is None or isinstance(params, SamplingParams) else params
    last, text_of_last = None, _text(SamplingParams())
    for index, prompt in enumerate([prompts] if is_single_prompt(prompts) else prompts):
        own = each[min(index, len(each) - 1)] if each else None
        if own is not last:
            last, text_of_last = own, _text(SamplingParams() if own is None else own)
        yield hashlib.blake2b((_text(prompt) + text_of_last).encode(), digest_size=8).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, default=_as_json, skipkeys=True, sort_keys=True)


def _as_json(value: Any) -> Any:
    if isinstance(value, SamplingParams):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(value)
    # the text of any other object may hold its address, which differs between processes
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
