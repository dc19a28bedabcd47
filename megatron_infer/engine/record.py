"""Records an engine's commands and outputs, and replays them to check that the tokens are the same.

A recording is JSON Lines, one event a line, in order:

    {"kind": "run", "version": 1, "model": ..., "config": {...}}
    {"kind": "add", "step": 0, "id": "0", "tokens": [...], "seed": 1234, "params": {...}}
    {"kind": "abort", "step": 12, "id": "0"}
    {"kind": "done", "step": 30, "id": "1", "outputs": [{"tokens": [...], "reason": "length"}]}
    {"kind": "end", "step": 30}

`step` is the number of steps between `attach` and the command, so that a replay issues each command at the same step.
Every line is flushed, so that the recording of a crashed run is complete up to its last step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import RequestOutput

if TYPE_CHECKING:
    from megatron_infer.engine.engine import DynamicInferenceEngine

VERSION = 1


class RecordError(InferenceError, ValueError):
    """A file that is no recording, or a recording that the engine cannot replay."""


class RunRecorder:
    """Records an engine, as its listener, from `attach` to `close`. Attach it to an idle engine."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO = self.path.open("w", encoding="utf-8")
        self._engine: DynamicInferenceEngine | None = None
        self._first_step = self._last_step = 0
        self._tokens: dict[tuple[str, int], list[int]] = {}

    def attach(self, engine: DynamicInferenceEngine, *, model: str = "") -> RunRecorder:
        """Begin to record; the first line has the engine's configuration."""
        if engine.has_unfinished():
            raise RecordError("recording must begin on an idle engine; finish or abort its requests first")
        self._engine = engine
        self._first_step = self._last_step = engine.num_steps
        self._write(kind="run", version=VERSION, model=model, config=engine.config.to_dict())
        engine.loop.listeners.append(self)
        return self

    def close(self) -> None:
        """Detach and end the file; may be called again."""
        if self._file.closed:
            return
        if self._engine is not None:
            self._engine.loop.listeners.remove(self)
            self._write(kind="end", step=self._last_step - self._first_step)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the engine's listener calls
    def on_add(self, request_id: str, token_ids: list[int], params: SamplingParams, step: int) -> None:
        assert self._engine is not None
        group = self._engine.output_processor.get(request_id)
        assert group is not None, f"request {request_id!r} was added before its state was created"
        request = group.sequences[0].request
        salt = {"salt": request.cache.salt} if request.cache.salt else {}
        self._write(
            kind="add",
            step=step - self._first_step,
            id=request_id,
            tokens=list(token_ids),
            seed=request.seed,
            params=params.to_dict(),
            **salt,
        )

    def on_abort(self, request_id: str, step: int) -> None:
        self._tokens = {key: kept for key, kept in self._tokens.items() if key[0] != request_id}
        self._write(kind="abort", step=step - self._first_step, id=request_id)

    def on_step(self, step: int, outputs: list[RequestOutput]) -> None:
        self._last_step = step
        for output in outputs:
            self._collect(output)
            if output.finished:
                results = [
                    {"tokens": self._tokens.pop((output.request_id, o.index)), "reason": o.finish_reason}
                    for o in output.outputs
                ]
                self._write(kind="done", step=step - self._first_step, id=output.request_id, outputs=results)

    def _collect(self, output: RequestOutput) -> None:
        """Collect all tokens so far: an output has all of them or, in delta mode, only the new ones."""
        is_cumulative = sum(len(o.token_ids) for o in output.outputs) == output.metrics.num_output_tokens
        for one in output.outputs:
            kept = self._tokens.setdefault((output.request_id, one.index), [])
            if is_cumulative:
                kept.clear()
            kept.extend(one.token_ids)

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and its recording."""

    request_id: str
    sample: int
    position: int | None
    """Index in the output of the first token that differs; None when only the finish reason does."""
    recorded: object
    replayed: object

    def __str__(self) -> str:
        where = "finish reason" if self.position is None else f"output token {self.position}"
        return (
            f"request {self.request_id!r}, sample {self.sample}: {where} "
            f"was {self.recorded!r} when recorded, is {self.replayed!r} now"
        )


def replay(path: str | Path, engine: DynamicInferenceEngine) -> list[RequestOutput]:
    """Issue the recorded commands to an idle engine at their steps -> outputs, in the order they finished.

    Outputs are cumulative; an aborted request's output, with the tokens until then, is among them. The engine's seed
    does not matter, as the recording has every request's own.
    """
    if engine.has_unfinished():
        raise RecordError("replay needs an idle engine; finish or abort its requests first")
    first, outputs = engine.num_steps, []
    for event in read(path):
        if event["kind"] not in ("add", "abort"):
            continue
        while engine.num_steps - first < event["step"]:
            before = engine.num_steps
            outputs += [o for o in engine.step() if o.finished]
            if engine.num_steps == before:
                raise RecordError(
                    f"{path}: the engine went idle at step {before - first}, before the recorded command of step "
                    f"{event['step']} ({event['kind']} {event['id']!r}); was it recorded with another configuration?"
                )
        if event["kind"] == "add":
            params = dataclasses.replace(SamplingParams.from_saved(event["params"]), seed=event["seed"])
            prompt = {"prompt_token_ids": event["tokens"], "cache_salt": event.get("salt", "")}
            engine.add_request(prompt, params, request_id=event["id"], stream="final")
        else:
            outputs.append(engine.abort(event["id"]))
    while engine.has_unfinished():
        outputs += [o for o in engine.step() if o.finished]
    return outputs


def verify(path: str | Path, engine: DynamicInferenceEngine) -> Difference | None:
    """Replay and compare -> the first difference, in the order requests finished; None: every token is the same."""
    outputs = {output.request_id: output for output in replay(path, engine)}
    for event in read(path):
        if event["kind"] != "done":
            continue
        output = outputs.get(event["id"])
        for index, recorded in enumerate(event["outputs"]):
            if output is None:
                return Difference(event["id"], index, 0, recorded["tokens"][:1], None)
            now = output.outputs[index]
            if recorded["tokens"] != now.token_ids:
                pairs = enumerate(zip(recorded["tokens"], now.token_ids, strict=False))
                shorter = min(len(recorded["tokens"]), len(now.token_ids))
                at = next((i for i, (a, b) in pairs if a != b), shorter)
                return Difference(event["id"], index, at, _at(recorded["tokens"], at), _at(now.token_ids, at))
            if recorded["reason"] != now.finish_reason:
                return Difference(event["id"], index, None, recorded["reason"], now.finish_reason)
    return None


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a recording, without a last line that a crash has cut short. Raises RecordError."""
    path = Path(path)
    try:
        *lines, cut_short = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text: {error}") from error
    if not lines:
        raise RecordError(f"{path}: no complete line{' (cut short)' if cut_short else ', the file is empty'}")
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}:{number}: not JSON: {error}") from error
        kind = event.get("kind") if isinstance(event, dict) else None
        if number == 1 and (kind != "run" or event.get("version") != VERSION):
            raise RecordError(f"{path}: not a recording of version {VERSION}; its first line must be of kind 'run'")
        if kind not in ("run", "add", "abort", "done", "end"):
            raise RecordError(f"{path}:{number}: unknown event {kind!r}")
        yield event


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
