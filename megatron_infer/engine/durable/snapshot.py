"""Saves an engine's requests to one file and loads them: the whole file or nothing of it."""

from __future__ import annotations

import hashlib
import json
import time
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.durable import file_format
from megatron_infer.engine.durable.journal import Generation, JournalRecords, read_journal
from megatron_infer.engine.durable.kv_restore import FileMemory, KVArchive, Memory, check_places, num_places
from megatron_infer.engine.durable.parcel import RECORDS, Parcel, bytes_tensor
from megatron_infer.engine.durable.rank_files import engine_of, layout_of, parts_beside, remove, save_together
from megatron_infer.engine.durable.request_codec import (
    Records,
    RequestRecord,
    SavedKV,
    SavedRequest,
    decode_request,
    encode_request,
    of_bytes,
    to_bytes,
)
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.requests.input_processor import InputProcessor
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.engine.requests.request_state import RequestState
from megatron_infer.errors import RequestError, SnapshotError
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.outputs.schema import OutputRecord, output_of, output_record
from megatron_infer.scheduler.policy import stored_tokens
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler

REFUSE, RECOMPUTE = "refuse", "recompute"
PARCEL = Path("parcel")
"""In the place of a file's path, in errors."""
_PROBES = 512
"""Token ids whose texts are compared to tell tokenizers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of `load_requests`, as request ids; nothing was loaded if it raised."""

    loaded: list[str]
    """Ids of requests that continue, oldest first."""
    with_kv: list[str]
    """Those whose sequences all continue where they were, without being recomputed."""
    recomputed: dict[str, str]
    """Those that had begun and are recomputed, and why."""
    finished: list[RequestOutput]
    """Outputs of requests that had finished and were not acknowledged: whole ones if they were kept."""
    notes: list[str]
    """Other findings, such as a line that a crash cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file's content, checked against the engine: loading it cannot fail any more."""

    path: Path
    generation: Generation | None
    """The snapshot's; None: it is not kept with a journal."""
    num_records: int
    """Records in the journal."""
    requests: list[SavedRequest]
    finished: list[RequestOutput]
    num_seeds: int
    num_ids: int
    weights: Mapping[str, Any]
    memory: FileMemory
    notes: list[str]


class Archive:
    """Writes and reads files of saved requests for one engine.

    A request's tokens always come back. Its keys, values and recurrent state do if they were saved, the model's shape,
    dtypes and content are the same and there is room; else its tokens are recomputed, and the same tokens are drawn
    after them.
    """

    def __init__(
        self,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        scheduler: Scheduler,
        weights: WeightManager,
        kv: KVArchive,
        rank_group: RankGroup,
    ) -> None:
        self._input, self._output, self._scheduler = input_processor, output_processor, scheduler
        self._weights, self._kv, self._rank_group = weights, kv, rank_group

    # ------------------------------------------------------------------ saving

    def save(
        self,
        path: Path,
        undelivered: Sequence[RequestOutput],
        finished: Mapping[str, RequestOutput],
        *,
        kv: bool = False,
    ) -> None:
        """Write every open request and the `finished` outputs to a file that needs no journal.

        With kv every rank calls it, with nothing in flight, and each writes its own part.
        """
        if not kv:
            before = parts_beside(path)
            file_format.write(path, *self.contents(undelivered, finished))
            remove(before)
            return
        self._weights.accept_changes()
        rank = self._rank_group.sharing.rank

        def make(names: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
            memory = self._kv.collect(_unfinished(self._output.requests))
            if not rank:
                return self.contents(undelivered, finished, memory=memory, part_names=names)
            return {"part": names[rank - 1], "kv": self._kv.describe(memory)}, memory.tensors

        save_together(path, make, self._rank_group)

    def parcel(self, state: RequestState, undelivered: Sequence[RequestOutput]) -> Parcel:
        """The content of a file with one request and this rank's memory of it. Nothing may be in flight."""
        self._accept_changes()
        memory = self._kv.collect(_unfinished([state]))
        manifest, tensors = self.contents(undelivered, {}, states=[state], memory=memory)
        return Parcel(manifest=manifest | {"rank": self._rank_group.sharing.rank}, tensors=tensors)

    def contents(
        self,
        undelivered: Sequence[RequestOutput],
        finished: Mapping[str, RequestOutput],
        *,
        states: Sequence[RequestState] | None = None,
        memory: Memory | None = None,
        part_names: Sequence[str] = (),
        generation: Generation | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(manifest, tensors) of a file.

        undelivered: outputs that no caller has seen: their deltas are not handed out yet. states: None: all.
        part_names: files with other ranks' memory.
        """
        states, now = self._output.requests if states is None else states, time.monotonic()
        unsent, saved = _unsent(undelivered), {} if memory is None else memory.saved
        records = Records(
            requests=[encode_request(state, now=now, unsent=unsent.get(state.id), kv=saved) for state in states],
            finished=[output_record(output, now=now) for output in finished.values()],
        )
        manifest = {
            "num_requests": len(states),
            "num_finished": len(finished),
            "vocab_size": self._input.vocab_size,
            "tokenizer": self._tokenizer_digest,
            "num_seeds": self._input.num_seeds,
            "num_ids": self._input.num_ids,
            "weights": {"version": self._weights.version, "sums": self._weight_sums()},
            "kv": self._kv.describe(memory) if memory is not None and memory.saved else None,
            "engine": engine_of(self._rank_group.groups),
            "layout": layout_of(self._rank_group.groups),
            "parts": list(part_names),
            "generation": None if generation is None else generation.as_list(),
        }
        return manifest, {RECORDS: bytes_tensor(to_bytes(records))} | ({} if memory is None else memory.tensors)

    # ------------------------------------------------------------------ loading

    def read(self, path: Path, *, owed: Iterable[str] = (), changed_adapters: str = REFUSE) -> Content:
        """The content of `path`, and of its journal if it is kept with one. Raises SnapshotError; changes nothing.

        owed: ids of finished outputs that the engine holds, which must not be in the file as well. changed_adapters:
        "refuse" or "recompute" requests whose adapter has another content now.
        """
        content = self._understood(path, *file_format.read(path))
        self._check(content, set(owed))
        changed = [request for request in content.requests if self._has_changed_adapter(request)]
        if changed and changed_adapters == REFUSE:
            state = changed[0].state
            raise SnapshotError(
                path,
                f"request {state.id!r} began with another content of adapter {state.params.adapter!r} than is loaded; "
                'load that one, or give changed_adapters="recompute" to go on with this one',
            )
        for request in changed:
            request.forget_memory()
        return content

    def open(
        self,
        parcel: Parcel,
        request_id: str | None,
        drawn: Sequence[DrawnSequence] | None,
        *,
        owed: Iterable[str] = (),
    ) -> Content:
        """The content of a parcel, checked against this engine, which does not change. Raises SnapshotError.

        request_id, drawn: see `DynamicInferenceEngine.take_in`.
        """
        content = self._understood(PARCEL, parcel.manifest, parcel.tensors)
        if len(content.requests) != 1 or content.finished or content.generation is not None:
            raise SnapshotError(PARCEL, f"it has {len(content.requests)} requests, and not one")
        request = content.requests[0]
        if request_id is not None:
            request.rename(request_id)
        if drawn is not None:
            request.resume_behind(drawn)
        self._check(content, set(owed))
        if self._has_changed_adapter(request):
            request.forget_memory()
        return content

    def _understood(self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Content:
        try:
            return self._decode(path, manifest, tensors)
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            AssertionError,
            RuntimeError,
            StopIteration,
        ) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(path, f"its content cannot be understood ({type(error).__name__}: {error})") from error

    def _raise_adapter_versions(self, content: Content) -> None:
        """Versions of an adapter only rise, too."""
        adapters = self._scheduler.context.adapters
        if adapters is None:
            return
        for saved in content.requests:
            name = saved.state.params.adapter
            for sequence in saved.state.sequences:
                found = sequence.request.history.adapter
                if name is not None and found is not None:
                    adapters.raise_version(name, found[0] + (found[1] != adapters.versions[name][1]))

    def _has_changed_adapter(self, saved: SavedRequest) -> bool:
        adapters, name = self._scheduler.context.adapters, saved.state.params.adapter
        if name is None or adapters is None:
            return False
        began = (sequence.request.history.adapter for sequence in saved.state.sequences)
        return any(one is not None and one[1] != adapters.versions[name][1] for one in began)

    def put_back(self, content: Content) -> LoadReport:
        """Take in what `read` gave; nothing may be in flight."""
        weights, processor = self._weights, self._input
        weights.accept_changes()
        unusable = self._rank_group.first_text("a look at saved keys and values", self._kv.why_unusable(content.memory))
        # Only a leader can tell whether these are the weights: the sums in a file are those of its part.
        differ = self._rank_group.groups.is_leader and content.weights["sums"] != self._weight_sums()
        looks = self._rank_group.lockstep.gather(
            "a look at saved weights", json.dumps([content.weights["version"], differ])
        )
        versions, others = zip(*map(json.loads, looks), strict=True)
        # Versions only rise: tokens drawn from now on must not have the version of other weights.
        weights.raise_version(max(versions) + (unusable is not None and any(others)))
        processor.num_seeds = max(processor.num_seeds, content.num_seeds)
        processor.num_ids = max(processor.num_ids, content.num_ids)
        self._raise_adapter_versions(content)
        return self._put_in(content, unusable)

    def take_in(self, content: Content) -> LoadReport:
        """Take in what `open` gave; nothing may be in flight. Weights keep their version."""
        weights = self._weights
        self._accept_changes()
        unusable, version = self._kv.why_unusable(content.memory), content.weights["version"]
        if unusable is None and version != weights.version:
            unusable = f"the weights are of version {weights.version}, it was computed with version {version}"
        return self._put_in(content, self._rank_group.first_text("a look at a parcel", unusable))

    def _accept_changes(self) -> None:
        """As a step does: the content of weights is read only while no request runs."""
        weights, scheduler = self._weights, self._scheduler
        if self._rank_group.any_rank(weights.differ(read_all=not (scheduler.num_running or scheduler.num_paused))):
            weights.accept(weights.version + 1)

    def _put_in(self, content: Content, unusable: str | None) -> LoadReport:
        returning = self._kv.returning(content.memory) if unusable is None else None
        for request in content.requests:
            watched = self._output.add(request.state)
            for sequence, saved in zip(request.state.sequences, request.saved, strict=True):
                sequence.resume_at(saved.sent, watched=watched)
        back: set[str] = set()
        for leader, kv in _in_order(content.requests):
            if returning is not None and kv is not None and returning.readmit(leader, kv):
                back.update(request.id for request in (leader, *leader.siblings))
            else:
                self._scheduler.add(leader)
        return _report(content, back, unusable or "no room in the cache for what was computed of it")

    # ------------------------------------------------------------------ checks and parts

    def _decode(self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Content:
        tokenizer, now = self._output.tokenizer, time.monotonic()
        for name, here in (
            ("vocab_size", self._input.vocab_size),
            ("tokenizer", self._tokenizer_digest),
        ):
            if manifest[name] != here:
                raise SnapshotError(path, f"saved with {name} {manifest[name]}, this engine's is {here}")
        here = engine_of(self._rank_group.groups)
        if (saved := manifest.get("engine", here)) != here:
            raise SnapshotError(
                path, f"saved by {saved}, and this is {here}: requests of several have the same ids; load it there"
            )
        weights, counts = manifest["weights"], [manifest["num_seeds"], manifest["num_ids"]]
        if not all(type(count) is int and 0 <= count < 1 << 62 for count in (weights["version"], *counts)):
            raise ValueError(f"weights {weights}, num_seeds and num_ids {counts}")
        records = of_bytes(tensors[RECORDS].numpy().tobytes(), Records)
        requests = [decode_request(one, tokenizer=tokenizer, now=now) for one in records.requests]
        finished = [output_of(one, now=now) for one in records.finished]
        generation = Generation.from_list(manifest["generation"])
        journal = JournalRecords() if generation is None else read_journal(path, generation)
        requests, finished = self._replay(journal, requests, finished, now=now)
        memory = self._kv.read(path, manifest, tensors)
        places = num_places(memory.kv, memory.tensors)
        block_size = None if memory.kv is None else memory.kv.get("block_size")
        for request in requests if memory.unusable is None else ():
            for sequence, saved in zip(request.state.sequences, request.saved, strict=True):
                if saved.kv is not None:
                    num_known = len(sequence.request.tokens)
                    check_places(saved.kv, places, num_known=num_known, block_size=block_size)
        return Content(
            path=path,
            generation=generation,
            requests=requests,
            finished=finished,
            num_records=journal.num_records,
            num_seeds=max(manifest["num_seeds"], journal.num_seeds),
            num_ids=max(manifest["num_ids"], journal.num_ids),
            weights={"version": weights["version"], "sums": weights["sums"]},
            memory=memory,
            notes=journal.notes,
        )

    def _replay(
        self, journal: JournalRecords, requests: list[SavedRequest], finished: list[RequestOutput], *, now: float
    ) -> tuple[list[SavedRequest], list[RequestOutput]]:
        """A snapshot's requests and outputs with the records of its journal applied."""
        tokenizer = self._output.tokenizer
        live: dict[str, SavedRequest] = {}
        owed: dict[str, RequestOutput] = {}

        def enter(request_id: str) -> str:
            if request_id in live or request_id in owed:
                raise ValueError(f"request {request_id!r} is in it twice")
            return request_id

        live.update((enter(request.state.id), request) for request in requests)
        owed.update((enter(output.request_id), output) for output in finished)
        for kind, data in journal.records:
            if kind == "accept":
                request = decode_request(
                    of_bytes(b64decode(data["record"]), RequestRecord), tokenizer=tokenizer, now=now
                )
                live[enter(request.state.id)] = request
            elif kind == "finish":
                output = output_of(of_bytes(b64decode(data["record"]), OutputRecord), now=now)
                live.pop(output.request_id, None)
                owed[output.request_id] = output
            else:
                for request_id in data["ids"]:
                    owed.pop(request_id, None)
        return list(live.values()), list(owed.values())

    def _check(self, content: Content, owed: set[str]) -> None:
        """Raise SnapshotError for a request that this engine cannot serve, so that no part of a file is loaded."""
        ids = [*(request.state.id for request in content.requests), *(out.request_id for out in content.finished)]
        for request_id in ids:
            if request_id in self._output or request_id in owed:
                raise SnapshotError(content.path, f"request {request_id!r} is in the engine already")
        for request in content.requests:
            self._check_request(content, request)

    def _check_request(self, content: Content, saved: SavedRequest) -> None:
        state, path = saved.state, content.path
        most, vocab_size = self._input.sizes.max_sequence_length, self._input.vocab_size
        name = f"request {state.id!r}"
        try:
            self._input.check_params(state.params)
        except RequestError as error:
            raise SnapshotError(path, f"{name}: {error}") from error
        leader = state.sequences[0].request
        if not leader.prompt_len:
            raise SnapshotError(path, f"{name} has no prompt")
        if leader.max_total > most:
            raise SnapshotError(
                path,
                f"{name} may grow to {leader.max_total:,} tokens, this engine's max_sequence_length is {most:,}; "
                "raise it",
            )
        stored, room = stored_tokens(leader.max_total), self._scheduler.context.max_stored_tokens
        if stored > room:
            raise SnapshotError(
                path,
                f"{name} may grow to {stored:,} stored tokens, this engine's cache holds {room:,} of one sequence; "
                "raise buffer_size_gb",
            )
        for sequence in state.sequences:
            request = sequence.request
            wrong = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise SnapshotError(path, f"{name}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
            if request.finish_reason is None and not len(request.tokens) < request.max_total:
                raise SnapshotError(path, f"{name} is unfinished with {len(request.tokens):,} tokens of its limit")

    def _weight_sums(self) -> str:
        """The weight guard's checksums as one text: equal if tokens would be drawn with the same weights."""
        return hashlib.blake2b(repr(self._weights.guard.sums).encode(), digest_size=16).hexdigest()

    @cached_property
    def _tokenizer_digest(self) -> str | None:
        tokenizer = self._output.tokenizer
        if tokenizer is None:
            return None
        size = self._input.vocab_size
        ids = range(0, size, max(1, size // _PROBES))
        text = repr([(token, tokenizer.token_str(token)) for token in ids])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _unfinished(states: Iterable[RequestState]) -> list[Request]:
    return [one.request for state in states for one in state.sequences if one.request.finish_reason is None]


def _unsent(undelivered: Iterable[RequestOutput]) -> dict[str, dict[int, tuple[int, int]]]:
    """By request and sequence index, (tokens, characters) of outputs that wait for a caller; used for deltas only."""
    unsent: dict[str, dict[int, tuple[int, int]]] = {}
    for output in undelivered:
        held = unsent.setdefault(output.request_id, {})
        for one in output.outputs:
            tokens, chars = held.get(one.index, (0, 0))
            held[one.index] = (tokens + len(one.token_ids), chars + len(one.text))
    return unsent


def _in_order(requests: Sequence[SavedRequest]) -> list[tuple[Request, SavedKV | None]]:
    """Unfinished sequences by arrival; siblings that have drawn nothing are behind the first of them."""
    order: list[tuple[int, Request, SavedKV | None]] = []
    for one in requests:
        fresh: list[tuple[int, Request, SavedKV | None]] = []
        for sequence, saved in zip(one.state.sequences, one.saved, strict=True):
            request = sequence.request
            if request.finish_reason is None:
                (order if request.num_output else fresh).append((saved.arrival, request, saved.kv))
        if fresh:
            # One that had begun leads, so that all of them use what was computed of the prompt.
            fresh.sort(key=lambda entry: (entry[2] is None, entry[0]))
            leader = fresh[0]
            leader[1].siblings = tuple(request for _, request, _ in fresh[1:])
            order.append((min(arrival for arrival, _, _ in fresh), *leader[1:]))
    order.sort(key=lambda entry: entry[0])
    return [(request, kv) for _, request, kv in order]


def _report(content: Content, back: set[str], unusable: str) -> LoadReport:
    with_kv: list[str] = []
    recomputed: dict[str, str] = {}
    for one in content.requests:
        begun = [
            sequence.request.id
            for sequence, saved in zip(one.state.sequences, one.saved, strict=True)
            if saved.begun and sequence.request.finish_reason is None
        ]
        if begun and back.issuperset(begun):
            with_kv.append(one.state.id)
        elif begun:
            recomputed[one.state.id] = unusable
    return LoadReport(
        loaded=[one.state.id for one in content.requests],
        with_kv=with_kv,
        recomputed=recomputed,
        finished=content.finished,
        notes=content.notes,
    )
