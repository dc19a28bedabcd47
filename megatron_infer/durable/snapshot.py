"""Saving an engine's requests to one file and loading them: all of a file or nothing of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.durable import file_format as file_format
from megatron_infer.durable.codec import (
    Columns,
    Inline,
    SavedKV,
    SavedRequest,
    decode_group,
    decode_output,
    encode_group,
    encode_output,
)
from megatron_infer.durable.journal import Generation, JournalRecords, read_journal
from megatron_infer.durable.kv_restore import (
    KVReturn,
    Memory,
    check_places,
    collect,
    content_digest,
    describe,
    difference,
    num_places,
)
from megatron_infer.durable.rank_files import layout_differs, layout_of, parts_beside, read_part, remove, save_together
from megatron_infer.engine.build import Assembly
from megatron_infer.errors import RequestError, SnapshotError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.requests.output_processor import OutputProcessor
from megatron_infer.scheduler.policy import stored_tokens
from megatron_infer.scheduler.request import Request

_PROBES = 512
"""Token ids whose spelling tells one tokenizer from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load brought."""

    loaded: list[str]
    """Requests that go on, oldest first."""
    with_kv: list[str]
    """Those whose samples all go on where they were, nothing being computed again."""
    recomputed: dict[str, str]
    """Those that had begun and whose tokens are computed again, and why."""
    finished: list[RequestOutput]
    """Outputs of requests that had finished and that nobody acknowledged: whole ones when they were kept."""
    notes: list[str]
    """What else was found, such as a line that a crash cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds, checked against the engine: loading it cannot fail any more."""

    path: Path
    generation: Generation | None
    """Of the snapshot, when it is kept with a journal."""
    num_records: int
    """In the journal."""
    requests: list[SavedRequest]
    finished: list[RequestOutput]
    num_seeds: int
    num_ids: int
    weights: Mapping[str, Any]
    kv: Mapping[str, Any] | None
    """What the saved memory depends on; None: there is none in it."""
    memory: Mapping[str, Tensor]
    """This rank's, see `durable.kv_restore`."""
    no_memory: str | None
    """Why the file's memory is of no use on this rank, whatever the weights; None: it may be."""
    notes: list[str]


class Archive:
    """Writes and reads files of saved requests for one engine.

    A request's tokens always come back. Its keys, values and recurrent state do when they were saved, shape, dtypes and
    content of the model are the same and there is room; else its tokens are computed again, which draws the same
    tokens after them.
    """

    def __init__(self, parts: Assembly, output_processor: OutputProcessor) -> None:
        self._parts, self._output_processor = parts, output_processor
        self._digest: tuple[int, str] | None = None

    # ------------------------------------------------------------------ saving

    def save(
        self,
        path: Path,
        undelivered: Sequence[RequestOutput],
        finished: Mapping[str, RequestOutput],
        *,
        kv: bool = False,
    ) -> None:
        """Write every open request and the `finished` outputs to a file that stands by itself.

        With kv every rank calls it, with nothing in flight, and each writes its own part.
        """
        if not kv:
            before = parts_beside(path)
            file_format.write(path, *self.contents(undelivered, finished))
            remove(before)
            return
        parts = self._parts
        if parts.rank_group.any_rank(parts.guard.changed()):
            parts.accept_weights(parts.weight_version + 1)
        store = parts.runner.store
        attends = parts.rank_group.any_rank(store.layout.block_bytes > 0)

        def make(names: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
            requests = _open_requests(self._output_processor.groups)
            memory = collect(requests, store, attends=attends, recurrent=parts.context.states is not None)
            if parts.rank_group.groups.is_leader:
                return self.contents(undelivered, finished, memory=memory, part_names=names)
            name = names[parts.rank_group.groups.engine_rank - 1]
            return {"part": name, "kv": self._describe(memory)}, memory.tensors

        save_together(path, make, parts.rank_group)

    def contents(
        self,
        undelivered: Sequence[RequestOutput],
        finished: Mapping[str, RequestOutput],
        *,
        memory: Memory | None = None,
        part_names: Sequence[str] = (),
        generation: Generation | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(manifest, tensors) of a file.

        undelivered: outputs that were made and that no caller has seen: their deltas are not handed out yet.
        part_names: where other ranks' memory is.
        """
        parts, output_processor, now = self._parts, self._output_processor, time.monotonic()
        groups, numbers = output_processor.groups, Columns()
        unsent, saved = _unsent(undelivered), {} if memory is None else memory.saved
        records = {
            "requests": [
                encode_group(group, numbers, now=now, unsent=unsent.get(group.id), kv=saved) for group in groups
            ],
            "finished": [encode_output(output, numbers, now=now) for output in finished.values()],
        }
        manifest = {
            "num_requests": len(groups),
            "num_finished": len(finished),
            "vocab_size": parts.shape.vocab_size,
            "tokenizer": self._tokenizer_digest(),
            "num_seeds": parts.input_processor.num_seeds,
            "num_ids": parts.input_processor.num_ids,
            "weights": {"version": parts.weight_version, "sums": self._weight_sums()},
            "kv": self._describe(memory) if memory is not None and memory.saved else None,
            "layout": layout_of(parts.rank_group.groups),
            "parts": list(part_names),
            "generation": None if generation is None else generation.as_list(),
        }
        tensors = {**numbers.tensors(), "records": _bytes_tensor(json.dumps(records, separators=(",", ":")).encode())}
        return manifest, tensors | ({} if memory is None else memory.tensors)

    def _describe(self, memory: Memory) -> dict[str, Any]:
        """What saved memory of this rank depends on, and how much of it there is."""
        return {
            "shape": describe(self._parts.shape, kv_dtype=self._parts.kv_dtype),
            "content": self._content(),
            "block_size": self._parts.runner.store.layout.block_size if memory.num_blocks else None,
            "num_blocks": memory.num_blocks,
            "num_states": memory.num_states,
        }

    # ------------------------------------------------------------------ loading

    def read(self, path: Path, *, owed: Iterable[str] = ()) -> Content:
        """What `path`, and its journal if it is kept with one, hold. Raises SnapshotError; changes nothing.

        owed: ids of finished outputs that the engine still holds, which a file must not bring again.
        """
        manifest, tensors = file_format.read(path)
        try:
            content = self._decode(path, manifest, tensors)
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(path, f"its content cannot be understood ({type(error).__name__}: {error})") from error
        self._check(content, set(owed))
        return content

    def put_back(self, content: Content) -> LoadReport:
        """Take in what `read` gave; nothing may be in flight."""
        parts, output_processor = self._parts, self._output_processor
        if parts.rank_group.any_rank(parts.guard.changed()):
            parts.accept_weights(parts.weight_version + 1)
        refused = parts.rank_group.first_word("a look at saved keys and values", self._why_no_kv(content))
        # The leader alone knows whether these are the weights: the sums in a file are of its part of them.
        known = parts.rank_group.from_leader("a look at saved weights", content.weights["sums"] == self._weight_sums())
        same = refused is None or known
        # Versions only rise: tokens drawn from now on must not carry the version of other weights.
        parts.raise_version(content.weights["version"] + (not same))
        parts.input_processor.num_seeds = max(parts.input_processor.num_seeds, content.num_seeds)
        parts.input_processor.num_ids = max(parts.input_processor.num_ids, content.num_ids)
        returning = None
        if refused is None:
            assert content.kv is not None
            size = content.kv.get("block_size") or _block_size(content.memory)
            returning = KVReturn(content.memory, parts.scheduler, parts.runner.store, block_size=size)
        for request in content.requests:
            watched = output_processor.enter(request.group)
            for sample, saved in zip(request.group.samples, request.saved, strict=True):
                sample.resume_at(saved.sent, watched=watched)
        back: set[str] = set()
        for leader, kv in _in_order(content.requests):
            if returning is not None and kv is not None and returning.readmit(leader, kv):
                back.update(request.id for request in (leader, *leader.siblings))
            else:
                parts.scheduler.add(leader)
        return _report(content, back, refused or "no room in the cache for what was computed of it")

    # ------------------------------------------------------------------ checks and parts

    def _decode(self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Content:
        tokenizer, now = self._output_processor.tokenizer, time.monotonic()
        for name, here in (
            ("vocab_size", self._parts.shape.vocab_size),
            ("tokenizer", self._tokenizer_digest()),
        ):
            if manifest[name] != here:
                raise SnapshotError(path, f"saved with {name} {manifest[name]}, this engine's is {here}")
        records = json.loads(tensors["records"].numpy().tobytes())
        numbers = Columns(tensors)
        requests = [decode_group(one, numbers, tokenizer=tokenizer, now=now) for one in records["requests"]]
        finished = [decode_output(one, numbers, tokenizer=tokenizer, now=now) for one in records["finished"]]
        generation = Generation.from_list(manifest["generation"])
        journal = JournalRecords() if generation is None else read_journal(path, generation)
        requests, finished = self._replay(journal, requests, finished, now=now)
        about, memory, no_memory = self._memory_of_rank(path, manifest, tensors)
        counts = num_places(about, memory)
        for kv in (saved.kv for request in requests for saved in request.saved):
            if kv is not None and no_memory is None:
                check_places(kv, counts)
        return Content(
            path=path,
            generation=generation,
            requests=requests,
            finished=finished,
            num_records=journal.num_records,
            num_seeds=max(manifest["num_seeds"], journal.num_seeds),
            num_ids=max(manifest["num_ids"], journal.num_ids),
            weights=manifest["weights"],
            kv=about,
            memory=memory,
            no_memory=no_memory,
            notes=journal.notes,
        )

    def _memory_of_rank(
        self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any] | None, Mapping[str, Tensor], str | None]:
        """(what this rank's saved memory depends on, the memory, why there is none for it)."""
        groups, about = self._parts.rank_group.groups, manifest["kv"]
        if about is None:
            return None, {}, "saved without keys and values"
        if (differs := layout_differs(layout_of(groups), manifest.get("layout", {"ranks": 1}))) is not None:
            return None, {}, differs
        if groups.engine_rank:
            try:
                about, tensors = read_part(path, manifest, groups.engine_rank)
            except FileNotFoundError as error:
                return None, {}, f"the part of rank {groups.engine_rank} is missing: {error.filename or error}"
        return about, {name: tensors[name] for name in ("blocks", "states") if name in tensors}, None

    def _replay(
        self, journal: JournalRecords, requests: list[SavedRequest], finished: list[RequestOutput], *, now: float
    ) -> tuple[list[SavedRequest], list[RequestOutput]]:
        """What has become of a snapshot's requests and outputs, by its journal."""
        tokenizer, numbers = self._output_processor.tokenizer, Inline()
        live: dict[str, SavedRequest] = {}
        owed: dict[str, RequestOutput] = {}

        def enter(request_id: str) -> str:
            if request_id in live or request_id in owed:
                raise ValueError(f"request {request_id!r} is in it twice")
            return request_id

        live.update((enter(request.group.id), request) for request in requests)
        owed.update((enter(output.request_id), output) for output in finished)
        for kind, data in journal.records:
            if kind == "accept":
                request = decode_group(data, numbers, tokenizer=tokenizer, now=now)
                live[enter(request.group.id)] = request
            elif kind == "finish":
                output = decode_output(data, numbers, tokenizer=tokenizer, now=now)
                live.pop(output.request_id, None)
                owed[output.request_id] = output
            else:
                for request_id in data["ids"]:
                    owed.pop(request_id, None)
        return list(live.values()), list(owed.values())

    def _check(self, content: Content, owed: set[str]) -> None:
        """Refuse what this engine cannot serve, so that nothing is loaded partly."""
        ids = [*(request.group.id for request in content.requests), *(out.request_id for out in content.finished)]
        for request_id in ids:
            if request_id in self._output_processor or request_id in owed:
                raise SnapshotError(content.path, f"request {request_id!r} is in the engine already")
        for request in content.requests:
            self._check_request(content, request)

    def _check_request(self, content: Content, saved: SavedRequest) -> None:
        group, path, limits = saved.group, content.path, self._parts.input_processor.limits
        name = f"request {group.id!r}"
        try:
            self._parts.input_processor.check_params(group.params)
        except RequestError as error:
            raise SnapshotError(path, f"{name}: {error}") from error
        leader = group.samples[0].request
        if leader.max_total > limits.max_sequence_length:
            raise SnapshotError(
                path,
                f"{name} may grow to {leader.max_total:,} tokens, this engine's max_sequence_length is "
                f"{limits.max_sequence_length:,}; raise it",
            )
        stored, room = stored_tokens(leader.max_total), self._parts.context.max_stored_tokens
        if stored > room:
            raise SnapshotError(
                path,
                f"{name} may grow to {stored:,} stored tokens, this engine's cache holds {room:,} of one sequence; "
                "raise buffer_size_gb",
            )
        for sample in group.samples:
            request = sample.request
            wrong = next((token for token in request.tokens if not 0 <= token < limits.vocab_size), None)
            if wrong is not None:
                raise SnapshotError(
                    path, f"{name}: token id {wrong} is outside the vocabulary (0 to {limits.vocab_size - 1})"
                )
            if request.finish_reason is None and not len(request.tokens) < request.max_total:
                raise SnapshotError(path, f"{name} is unfinished with {len(request.tokens):,} tokens of its limit")

    def _why_no_kv(self, content: Content) -> str | None:
        """Why saved memory cannot be used; None when it can."""
        if content.kv is None:
            return content.no_memory
        differs = difference(self._parts.shape, content.kv["shape"], kv_dtype=self._parts.kv_dtype)
        if differs is not None:
            return differs
        if content.kv["content"] != self._content():
            return "the weights differ from those it was computed with"
        return None

    def _content(self) -> str:
        """The digest of all weights, made once for each update of them (labels may come twice)."""
        update = self._parts.num_updates
        if self._digest is None or self._digest[0] != update:
            self._digest = (update, content_digest(self._parts))
        return self._digest[1]

    def _weight_sums(self) -> str:
        """The weight guard's sums as one text: what tells whether tokens would be drawn by the same weights."""
        return hashlib.blake2b(repr(self._parts.guard.sums).encode(), digest_size=16).hexdigest()

    def _tokenizer_digest(self) -> str | None:
        tokenizer = self._output_processor.tokenizer
        if tokenizer is None:
            return None
        size = self._parts.shape.vocab_size
        ids = range(0, size, max(1, size // _PROBES))
        text = repr([(token, tokenizer.token_str(token)) for token in ids])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _block_size(memory: Mapping[str, Tensor]) -> int | None:
    return int(memory["blocks"].shape[3]) if "blocks" in memory else None


def _open_requests(groups: Iterable[Any]) -> list[Request]:
    return [sample.request for group in groups for sample in group.samples if sample.request.finish_reason is None]


def _unsent(undelivered: Iterable[RequestOutput]) -> dict[str, dict[int, tuple[int, int]]]:
    """By request and sample, (tokens, characters) of outputs that wait to be handed out. Only deltas count on it."""
    unsent: dict[str, dict[int, tuple[int, int]]] = {}
    for output in undelivered:
        held = unsent.setdefault(output.request_id, {})
        for one in output.outputs:
            tokens, chars = held.get(one.index, (0, 0))
            held[one.index] = (tokens + len(one.token_ids), chars + len(one.text))
    return unsent


def _bytes_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _in_order(requests: Sequence[SavedRequest]) -> list[tuple[Request, SavedKV | None]]:
    """Unfinished sequences by arrival, those of a group that have drawn nothing behind the first of them."""
    order: list[tuple[int, Request, SavedKV | None]] = []
    for one in requests:
        fresh: list[tuple[int, Request, SavedKV | None]] = []
        for sample, saved in zip(one.group.samples, one.saved, strict=True):
            request = sample.request
            if request.finish_reason is None:
                (order if request.num_output else fresh).append((saved.arrival, request, saved.kv))
        if fresh:
            # The one that had begun leads, so that what was computed of the prompt serves all of them.
            fresh.sort(key=lambda entry: (entry[2] is None, entry[0]))
            leader = fresh[0]
            leader[1].siblings = tuple(request for _, request, _ in fresh[1:])
            order.append((min(arrival for arrival, _, _ in fresh), *leader[1:]))
    order.sort(key=lambda entry: entry[0])
    return [(request, kv) for _, request, kv in order]


def _report(content: Content, back: set[str], refused: str) -> LoadReport:
    with_kv: list[str] = []
    recomputed: dict[str, str] = {}
    for one in content.requests:
        begun = [
            sample.request.id
            for sample, saved in zip(one.group.samples, one.saved, strict=True)
            if saved.begun and sample.request.finish_reason is None
        ]
        if begun and back.issuperset(begun):
            with_kv.append(one.group.id)
        elif begun:
            recomputed[one.group.id] = refused
    return LoadReport(
        loaded=[one.group.id for one in content.requests],
        with_kv=with_kv,
        recomputed=recomputed,
        finished=content.finished,
        notes=content.notes,
    )
