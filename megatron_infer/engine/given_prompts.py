"""The prompts that callers give to the ranks of one engine: which ranks share a list, and which have their own.

every rank   digest of its prompts --report of the call's first round--> all digests on all ranks --> one source a rank
a source     queues its prompts for all ranks; its outputs go to the ranks whose source it is

Iterators are compared by the prompts that a call begins with, and further on where ranks share them:

source       digests of the prompts that it reads  --Outbox, in a call that travels anyway-->  its readers
readers      read as many of their own and compare --report of their next call-->  PromptsDiffer on all ranks
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.requests.input_processor import is_single_prompt

Params = SamplingParams | Sequence[SamplingParams] | None


def report_of(data_rank: int, prompts: Any, params: Params) -> str:
    """What a rank reports of the prompts of its call, for `sources_of`.

    data_rank: equal for tensor- and pipeline-parallel ranks, to which trainers give the same data. prompts: None or
    an empty list: the rank gives none.
    """
    given = None if prompts is None else list(digests_of(prompts, params))
    return json.dumps([data_rank, given and hashlib.blake2b("".join(given).encode(), digest_size=8).hexdigest()])


def sources_of(reports: Sequence[str]) -> list[int | None]:
    """For each rank the rank whose prompts its call is served with; None for a rank that is not in the call.

    Ranks with equal prompts have the first of them. A rank without prompts has what the first rank of its data rank
    with prompts has; if there is none, an empty list is its own, and None stands for the prompts of rank 0.
    """
    given = {rank: json.loads(report) for rank, report in enumerate(reports) if report}
    first: dict[str, int] = {}
    found = {rank: first.setdefault(digest, rank) for rank, (_, digest) in given.items() if digest}
    of_data: dict[int, int] = {}
    for rank, source in found.items():
        of_data.setdefault(given[rank][0], source)
    for rank, (data_rank, digest) in given.items():
        if not digest:
            other = found.get(0, rank) if digest is None and 0 in given and given[0][1] else rank
            found[rank] = of_data.get(data_rank, other)
    return [found.get(rank) for rank in range(len(reports))]


class GivenPrompts:
    """Prompts of a caller that shares those of another rank, read as far as that rank reads its own."""

    def __init__(self, prompts: Any, params: Params) -> None:
        """prompts: one, or an iterable of them; None: no prompts. params: one for all, or one for each."""
        self._digests = digests_of(() if prompts is None else prompts, params)
        self._num_read = 0

    def difference(self, expected: str) -> str:
        """What is not as the source's next prompt; "" if nothing is, or if the caller has given no prompt at all.

        expected: its digest.
        """
        own = next(self._digests, None)
        if own is None and not self._num_read:
            return ""
        if own is None:
            return f"prompt {self._num_read} is missing"
        if own != expected:
            return f"prompt {self._num_read}, or its sampling parameters, are others"
        self._num_read += 1
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
