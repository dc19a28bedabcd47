"""Changes since a snapshot, line by line in a file beside it: accepted, finished and acknowledged requests.

    {"check": hex, "record": {"kind": "begin", "format": ..., "version": SCHEMA, "generation": [series, number]}}
    {"check": hex, "record": {"kind": "accept" | "finish" | "ack", "data": {...}}}

`check` is blake2b over generation, line number and record, so a line that is damaged, moved or of another run is
noticed. Snapshot and journal have the number of their generation; a snapshot also has the number of records of the
generation before that it contains. Whenever the process is killed, a load finds one of these:

    snapshot n, journal n        the usual state: all records are later than the snapshot
    snapshot n, journal n - 1    killed between the two renames: records that the snapshot contains are skipped
    no snapshot, journal 1       the first keep_snapshots had not returned: nothing was promised
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from megatron_infer.engine.durable.file_format import put_in_place
from megatron_infer.errors import SnapshotError
from megatron_infer.outputs.schema import SCHEMA
from megatron_infer.utils.files import regular

FORMAT = "megatron_infer.journal"
KINDS = ("accept", "finish", "ack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Says which snapshot and journal belong together."""

    series: str
    """Name of all generations that follow one another at one path."""
    number: int
    covered: int = 0
    """Records of the generation before that this one's snapshot contains."""

    @classmethod
    def first(cls) -> Generation:
        return cls(series=secrets.token_hex(8), number=1)

    def next(self, covered: int) -> Generation:
        return Generation(series=self.series, number=self.number + 1, covered=covered)

    def as_list(self) -> list[Any]:
        return [self.series, self.number, self.covered]

    @classmethod
    def from_list(cls, values: Any) -> Self | None:
        if values is None:
            return None
        series, number, covered = values
        return cls(series=series, number=number, covered=covered)


@dataclass(slots=True, kw_only=True)
class JournalRecords:
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_records: int = 0
    """Records in the file, including those that the snapshot contains."""
    num_seeds: int = 0
    num_ids: int = 0
    notes: list[str] = field(default_factory=list)


class Journal:
    """The file that grows. The operating system has a record when `append` returns: killing the process loses none.

    With fsync it is on the disk by then, and survives a crash of the machine too.
    """

    def __init__(self, path: Path, generation: Generation, *, fsync: bool) -> None:
        """path: the snapshot's. The file gets its name with `put_in_place`, or at the first record."""
        self.generation, self.num_records = generation, 0
        self._path, self._fsync = journal_path(path), fsync
        self._staged = self._path.with_name(self._path.name + ".tmp")
        self._in_place = False
        self._size = 0
        self._fd = os.open(self._staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            begin = {"kind": "begin", "format": FORMAT, "version": SCHEMA, "generation": generation.as_list()}
            self._write(_line("", 1, begin))
            os.fsync(self._fd)
        except BaseException:
            self.discard()
            raise

    def put_in_place(self) -> None:
        if not self._in_place:
            put_in_place(self._staged, self._path)
            self._in_place = True

    def append(self, records: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Write (kind, data) records, all or none: after an OSError the file is as it was."""
        self.put_in_place()
        lines = [
            _line(_salt(self.generation), number, {"kind": kind, "data": data})
            for number, (kind, data) in enumerate(records, start=self.num_records + 2)
        ]
        self._write(b"".join(lines))
        self.num_records += len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close a journal that was not put in place and remove it."""
        self.close()
        self._staged.unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        """Write behind the last complete record; what a failed write or fsync left there is cut off."""
        view, at = memoryview(content), self._size
        try:
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
            if self._fsync:
                os.fsync(self._fd)
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size = at


def journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


def read_journal(path: Path, generation: Generation) -> JournalRecords:
    """The journal of the snapshot at `path`, which is of `generation`.

    A last line without its end is a command that never returned: it is left out and noted. Any other damage raises
    SnapshotError with the line number.
    """
    file = journal_path(path)
    try:
        *lines, torn = regular(file).read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise SnapshotError(file, f"missing; {path} is kept together with it") from error
    except OSError as error:
        raise SnapshotError(file, f"cannot be read: {error.strerror}") from error
    if not lines:
        raise SnapshotError(file, "damaged in line 1: it has no beginning")
    begin = _record(file, "", 1, lines[0])
    if begin.get("format") != FORMAT or begin.get("version") != SCHEMA:
        raise SnapshotError(file, f"format {begin.get('format')!r} {begin.get('version')!r}, not {FORMAT!r} {SCHEMA!r}")
    own = Generation.from_list(begin["generation"])
    assert own is not None
    if own.series != generation.series or own.number not in (generation.number, generation.number - 1):
        raise SnapshotError(
            file, f"of generation {own.number} ({own.series}), {path} is {generation.number} ({generation.series})"
        )
    salt = _salt(own)
    found = JournalRecords(num_records=len(lines) - 1)
    covered = generation.covered if own.number < generation.number else 0
    for number, line in enumerate(lines[1:], start=2):
        record = _record(file, salt, number, line)
        kind, data = record.get("kind"), record.get("data")
        if kind not in KINDS or not isinstance(data, dict):
            raise SnapshotError(file, f"line {number} is of unknown kind {kind!r}")
        if kind == "accept":
            found.num_seeds, found.num_ids = data["num_seeds"], data["num_ids"]
        if number - 2 >= covered:
            found.records.append((kind, data))
    if torn:
        _refuse_whole(file, salt, len(lines) + 1, torn)
        found.notes.append(f"{file}: line {len(lines) + 1} is cut short and left out: its command never returned")
    return found


def has_records(path: Path) -> bool:
    """Whether the journal beside `path` has records."""
    file = journal_path(path)
    return file.exists() and len(regular(file).read_bytes().split(b"\n", 1)[-1]) > 0


def _salt(generation: Generation) -> str:
    return f"{generation.series}/{generation.number}"


def _line(salt: str, number: int, record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b'{"check":"' + _check(salt, number, text) + b'","record":' + text + b"}\n"


def _check(salt: str, number: int, text: bytes) -> bytes:
    return hashlib.blake2b(f"{salt}/{number}/".encode() + text, digest_size=16).hexdigest().encode()


def _text(salt: str, number: int, line: bytes) -> bytes | None:
    """The record's JSON if the line is whole, else None."""
    head, check, middle, text = line[:10], line[10:42], line[42:53], line[53:-1]
    frame = (head, middle, line[-1:]) == (b'{"check":"', b'","record":', b"}")
    return text if frame and check == _check(salt, number, text) else None


def _record(file: Path, salt: str, number: int, line: bytes) -> dict[str, Any]:
    text = _text(salt, number, line)
    if text is None:
        raise SnapshotError(file, f"damaged in line {number}")
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
        if isinstance(record, dict):
            return record
    raise SnapshotError(file, f"line {number} is no record")


def _refuse_whole(file: Path, salt: str, number: int, torn: bytes) -> None:
    """Raise SnapshotError if only the line's end is wrong: its command did return."""
    if _text(salt, number, torn[:-1]) is not None:
        raise SnapshotError(file, f"damaged in line {number}")
