"""Requests that survive SIGKILL: periodic snapshots, and a journal line before each request and output is confirmed."""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.durable import file_format
from megatron_infer.engine.durable.journal import Generation, Journal, has_records, journal_path
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.durable.rank_files import path_of
from megatron_infer.engine.durable.request_codec import encode_request, to_bytes
from megatron_infer.engine.durable.snapshot import REFUSE, Archive, Content, LoadReport
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.requests.input_processor import InputProcessor
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.engine.requests.request_state import RequestState
from megatron_infer.errors import InferenceError, RequestError, SnapshotError, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.outputs.schema import output_record
from megatron_infer.scheduler.scheduler import Scheduler


class SnapshotManager:
    """One engine's saved requests: files on demand, and one that is kept up to date while it runs.

    A finished output stays in the kept files until `acknowledge`: the process may die after step() has returned it and
    before the caller has stored it, and only the caller can tell when it has. Outputs that are not acknowledged stay in
    memory too and are written with every snapshot: acknowledge as you store.
    """

    def __init__(
        self,
        archive: Archive,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        scheduler: Scheduler,
        rank_group: RankGroup,
    ) -> None:
        self.journal: Journal | None = None
        """None: no file is kept, and a step costs nothing here."""
        self.owed: dict[str, RequestOutput] = {}
        """Whole outputs that were not acknowledged, by id: of kept requests, and those that loads found."""
        self._archive, self._rank_group = archive, rank_group
        self._input, self._output, self._scheduler = input_processor, output_processor, scheduler
        self._unwritten: list[RequestOutput] = []
        self._known: dict[Path, tuple[Generation, int] | None] = {}
        """Files that were loaded, whose content is in this engine now: generation and records of the journal."""
        self._path: Path | None = None
        self._every_steps = self._num_steps = 0
        self._fsync = False

    # ------------------------------------------------------------------ on demand

    def save(self, path: str | os.PathLike[str], undelivered: Sequence[RequestOutput], *, kv: bool) -> None:
        """Write every unfinished request, and all outputs in `owed`, to `path`. With kv every rank calls it.

        undelivered: outputs that the engine has not handed out. The finished ones among them are saved as they are: of
        a delta stream the last piece.
        """
        target = path_of(path, self._rank_group.groups)
        with self._rank_group.together("saving requests") if kv else nullcontext():
            if self._path is not None and target.resolve() == self._path:
                raise SnapshotError(target, "keep_snapshots keeps it; save elsewhere, or call keep_snapshots(None)")
        finished = {output.request_id: output for output in undelivered if output.finished} | self.owed
        self._archive.save(target, undelivered, finished, kv=kv)

    def read(self, path: str | os.PathLike[str], changed_adapters: str = REFUSE) -> Content:
        """A file's content, checked against this engine, which does not change. Raises SnapshotError. On every rank."""
        with self._rank_group.together("reading saved requests"):
            return self._archive.read(
                path_of(path, self._rank_group.groups), owed=self.owed, changed_adapters=changed_adapters
            )

    def put_back(self, content: Content, undelivered: Sequence[RequestOutput]) -> LoadReport:
        """Take in what `read` returned. Nothing may be in flight."""
        report = self._archive.put_back(content)
        self.owed |= {output.request_id: output for output in report.finished}
        generation = content.generation
        self._known[content.path.resolve()] = None if generation is None else (generation, content.num_records)
        if self.journal is not None:
            self._snapshot(undelivered)
        return report

    # ------------------------------------------------------------------ to another engine

    def hand_out(self, state: RequestState, undelivered: Sequence[RequestOutput], *, whole: bool) -> Parcel:
        """An open request with its memory. Kept files do not have it any more; the caller lets it go.

        whole: on the leader with the memory of all ranks.
        """
        parcel = self._archive.parcel(state, undelivered)
        sharing = self._rank_group.sharing
        if whole and sharing.size > 1:
            with self._rank_group.together("handing out a request"):
                content = b"" if sharing.is_leader else parcel.to_bytes()
            others = sharing.collect("parts of a parcel", content)[1:]
            parcel = Parcel.whole([parcel, *map(Parcel.of_bytes, others)])
        if self.journal is not None:
            self.flush()
            record = to_bytes(output_record(state.output("cumulative"), now=time.monotonic()))
            ended = ("finish", {"record": b64encode(record).decode()})
            self.journal.append([ended, ("ack", {"ids": [state.id]})])
        return parcel

    def take_in(
        self,
        parcel: Parcel | bytes | None,
        request_id: str | None,
        drawn: Sequence[DrawnSequence] | None,
        caller: int,
        *,
        whole: bool,
    ) -> LoadReport:
        """Take in what another engine has handed out. Nothing may be in flight. Raises SnapshotError, RequestError.

        whole: the leader has the parts of all ranks, the others have None.
        """
        sharing = self._rank_group.sharing
        if whole and sharing.size > 1:
            parts: list[Parcel] = []
            with self._rank_group.together("dividing a parcel"):
                if sharing.is_leader:
                    whole_parcel = _read(parcel)
                    parts = [whole_parcel.part(rank) for rank in range(sharing.size)]
                contents = [part.to_bytes() for part in parts[1:]]
            dealt = sharing.deal("parts of a parcel", [b"", *contents])
            parcel = parts[0] if sharing.is_leader else dealt
        with self._rank_group.together("reading a parcel"):
            content = self._archive.open(_read(parcel), request_id, drawn, owed=self.owed)
        state = content.requests[0].state
        for sequence in state.sequences:
            sequence.request.caller = caller
        report = self._archive.take_in(content)
        self.accepted(state)
        return report

    def acknowledge(self, request_ids: Iterable[str] | None) -> int:
        """Drop finished outputs, all of them with None -> how many. Unknown ids are skipped.

        Raises UnknownRequest, and drops none, if one of the requests has not finished.
        """
        ids = list(self.owed) if request_ids is None else list(dict.fromkeys(request_ids))
        for request_id in ids:
            if request_id in self._output:
                raise UnknownRequest(f"request {request_id!r} has not finished; there is nothing to acknowledge yet")
        ids = [request_id for request_id in ids if request_id in self.owed]
        if self.journal is not None and ids:
            self.flush()
            self.journal.append([("ack", {"ids": ids})])
        for request_id in ids:
            del self.owed[request_id]
        return len(ids)

    # ------------------------------------------------------------------ kept up to date

    def keep(
        self,
        path: str | os.PathLike[str] | None,
        undelivered: Sequence[RequestOutput],
        *,
        every_steps: int,
        fsync: bool,
    ) -> None:
        """Begin to keep `path` and its journal up to date; None: write a last snapshot without a journal, and end.

        A request is in the files before add_request returns, a finished output before step() returns it and until it
        is acknowledged; other requests go on from the last snapshot, at most every_steps steps back, with the same
        tokens (delta streams send those again). fsync: survive a crash of the machine too.
        """
        if every_steps < 1:
            raise InferenceError(f"every_steps is at least 1, got {every_steps}")
        if self.journal is not None:
            self._end(undelivered)
        if path is None:
            return
        target = path_of(path, self._rank_group.groups)
        before = self._in_the_way(target)
        self._path = target.resolve()
        self._every_steps = every_steps
        self._fsync = fsync
        self.owed = {output.request_id: output for output in undelivered if output.finished} | self.owed
        try:
            self._begin(before, undelivered)
        except BaseException:
            self._path = None
            raise
        self._output.on_close = self._closed

    def accepted(self, state: RequestState) -> None:
        """Before add_request returns; if the line cannot be written, the request is not accepted."""
        if self.journal is None:
            return
        counts = {"num_seeds": self._input.num_seeds, "num_ids": self._input.num_ids}
        try:
            record = to_bytes(encode_request(state, now=time.monotonic()))
            self.journal.append([("accept", {"record": b64encode(record).decode(), **counts})])
        except BaseException:
            for sequence in state.sequences:
                self._scheduler.abort(sequence.request)
            self._output.on_close = None
            self._output.close(state)
            self._output.on_close = self._closed
            raise

    def flush(self) -> None:
        """Before outputs are handed out: write those that finished since to the journal."""
        if self._unwritten:
            assert self.journal is not None
            now = time.monotonic()
            records = [to_bytes(output_record(output, now=now)) for output in self._unwritten]
            self.journal.append([("finish", {"record": b64encode(record).decode()}) for record in records])
            self._unwritten = []

    def stepped(self, undelivered: Sequence[RequestOutput]) -> None:
        """Before step() returns; undelivered: its outputs and those that wait for the next step."""
        self.flush()
        self._num_steps += 1
        if self._num_steps >= self._every_steps and self._has_news():
            self._snapshot(undelivered)

    # ------------------------------------------------------------------ its files

    def _has_news(self) -> bool:
        """False while the engine is idle."""
        return len(self._output) > 0 or (self.journal is not None and self.journal.num_records > 0)

    def _closed(self, state: RequestState) -> None:
        output = state.output("cumulative")
        self.owed[state.id] = output
        self._unwritten.append(output)

    def _in_the_way(self, path: Path) -> tuple[Generation, int] | None:
        """Generation and records that this engine has loaded from `path`, if any; raises if other files are there."""
        known = self._known.get(path.resolve(), None)
        if path.resolve() not in self._known:
            if path.exists():
                raise SnapshotError(path, "there is a snapshot already; load_requests it first, or remove it")
            if has_records(path):
                raise SnapshotError(journal_path(path), "a journal without its snapshot; move it away")
        return known

    def _begin(self, before: tuple[Generation, int] | None, undelivered: Sequence[RequestOutput]) -> None:
        """The first snapshot and journal. If there was no snapshot with a journal, the journal comes first."""
        assert self._path is not None
        generation = Generation.first() if before is None else before[0].next(before[1])
        staged, journal = self._stage(generation, undelivered)
        try:
            if before is None:
                journal.put_in_place()
            file_format.put_in_place(staged, self._path)
            journal.put_in_place()
        except BaseException:
            staged.unlink(missing_ok=True)
            journal.discard()
            raise
        self.journal, self._num_steps = journal, 0

    def _snapshot(self, undelivered: Sequence[RequestOutput]) -> None:
        """Write the next generation. If it fails, the present one goes on."""
        old = self.journal
        assert old is not None and self._path is not None
        self.flush()
        staged, journal = self._stage(old.generation.next(old.num_records), undelivered)
        try:
            file_format.put_in_place(staged, self._path)
        except BaseException:  # the new snapshot may be in place: it says which records of the old journal it contains
            staged.unlink(missing_ok=True)
            journal.discard()
            raise
        self.journal, self._num_steps = journal, 0
        old.close()
        journal.put_in_place()

    def _stage(self, generation: Generation, undelivered: Sequence[RequestOutput]) -> tuple[Path, Journal]:
        assert self._path is not None
        contents = self._archive.contents(undelivered, self.owed, generation=generation)
        staged = file_format.stage(self._path, *contents)
        try:
            return staged, Journal(self._path, generation, fsync=self._fsync)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def _end(self, undelivered: Sequence[RequestOutput]) -> None:
        assert self.journal is not None and self._path is not None
        self._archive.save(self._path, undelivered, self.owed)
        self._known[self._path] = None
        journal_path(self._path).unlink(missing_ok=True)
        self.journal.close()
        self.journal = self._path = self._output.on_close = None
        self._unwritten = []


def _read(parcel: object) -> Parcel:
    if isinstance(parcel, bytes):
        return Parcel.of_bytes(parcel)
    if not isinstance(parcel, Parcel):
        raise RequestError(
            f"take_in() was given {type(parcel).__name__}, which is no parcel; give what hand_out() returned, or its "
            "bytes: on each rank the rank's part, or with whole=True the leader's parcel on the leader"
        )
    return parcel
