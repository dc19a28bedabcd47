"""A recorded run replays to the same tokens, whatever engine options change; a difference is named."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.record import Difference, RecordError, RunRecorder, read, replay, verify
from megatron_infer.outputs.request_output import CompletionOutput, RequestMetrics, RequestOutput


class FakeEngine:
    """Token i of a request is a function of (seed, i, twist), one per step. Notifies listeners as the engine does."""

    def __init__(self, *, twist: int = 0, first_seed: int = 100) -> None:
        self.config = InferenceConfig(
            buffer_size_gb=1, metrics_writer=SimpleNamespace(log=print), logging_step_interval=1
        )
        self.listeners, self.live, self.num_steps, self.loop = [], {}, 0, self
        self.twist, self.next_seed = twist, first_seed
        self.output_processor = SimpleNamespace(get=self.live.get)

    def add_request(self, ids, params, *, request_id=None, stream="cumulative"):
        request_id = request_id or f"r{self.next_seed}"
        seed = params.seed if params.seed is not None else self.next_seed
        self.next_seed += 1
        salt = ""
        if isinstance(ids, dict):
            ids, salt = ids["prompt_token_ids"], ids["cache_salt"]
        cache = SimpleNamespace(salt=salt)
        sequences = [SimpleNamespace(request=SimpleNamespace(seed=seed + i, cache=cache)) for i in range(params.n)]
        self.live[request_id] = SimpleNamespace(
            id=request_id, ids=ids, params=params, stream=stream, sequences=sequences, count=0
        )
        for listener in self.listeners:
            listener.on_add(request_id, ids, params, self.num_steps)
        return request_id

    def has_unfinished(self):
        return bool(self.live)

    def step(self):
        if not self.live:
            return []
        outputs = []
        for r in list(self.live.values()):
            r.count += 1
            done = r.count >= r.params.max_tokens
            if done:
                del self.live[r.id]
            outputs.append(self._output(r, "length" if done else None))
        self.num_steps += 1
        for listener in self.listeners:
            listener.on_step(self.num_steps, outputs)
        return outputs

    def abort(self, request_id):
        for listener in self.listeners:
            listener.on_abort(request_id, self.num_steps)
        return self._output(self.live.pop(request_id), "abort")

    def _output(self, r, reason):
        completions = []
        for index, sample in enumerate(r.sequences):
            tokens = [sample.request.seed * 1000 + i + (self.twist if i == 2 else 0) for i in range(r.count)]
            shown = tokens[-1:] if r.stream == "delta" else tokens
            completions.append(CompletionOutput(index, "", shown, finish_reason=reason))
        metrics = RequestMetrics(arrival_time=0, num_output_tokens=r.count * r.params.n)
        return RequestOutput(r.id, None, r.ids, None, completions, reason is not None, metrics)


def record(path, *, stream="cumulative"):
    """Requests that start and end while others run."""
    engine, done = FakeEngine(), {}
    with RunRecorder(path) as recorder:
        recorder.attach(engine, model="tiny")
        a = engine.add_request([1, 2], SamplingParams(max_tokens=5), stream=stream)
        engine.step()
        b = engine.add_request([3], SamplingParams(max_tokens=9, logit_bias={7: 0.5}, stop="\u2028"))
        c = engine.add_request([4, 5], SamplingParams(max_tokens=3, n=2, seed=9), stream=stream)
        for _ in range(3):
            engine.step()
        done[b] = engine.abort(b)
        while engine.has_unfinished():
            engine.step()
    return engine, (a, b, c)


@pytest.mark.parametrize("stream", ["cumulative", "delta"])
def test_replay_gives_the_same_tokens_on_an_engine_with_another_seed(tmp_path, stream):
    path = tmp_path / "run.jsonl"
    _, (a, b, c) = record(path, stream=stream)
    engine = FakeEngine(first_seed=555)
    assert verify(path, engine) is None
    outputs = replay(path, FakeEngine(first_seed=1))
    assert [o.request_id for o in outputs] == [c, b, a]  # in the order they finished
    tokens = {o.request_id: [x.token_ids for x in o.outputs] for o in outputs}
    assert tokens[a] == [[100000, 100001, 100002, 100003, 100004]]
    assert tokens[b] == [[101000, 101001, 101002]]  # aborted at the same step
    assert tokens[c] == [[9000, 9001, 9002], [10000, 10001, 10002]]


def test_replay_counts_steps_from_where_the_engine_stands(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    engine = FakeEngine()
    engine.add_request([1], SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        engine.step()
    assert verify(path, engine) is None


def test_the_first_different_token_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    _, (_, _, c) = record(path)
    difference = verify(path, FakeEngine(twist=7))
    assert difference == Difference(c, 0, 2, 9002, 9009)
    assert str(difference) == f"request '{c}', sample 0: output token 2 was 9002 when recorded, is 9009 now"


def test_a_shorter_answer_and_another_reason_are_differences(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["kind"] == "done" and len(event["outputs"]) == 1:
            event["outputs"][0]["tokens"].append(1)
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert verify(path, FakeEngine()) == Difference("r100", 0, 5, 1, None)
    for event in events:
        if event["kind"] == "done" and len(event["outputs"]) == 1:
            event["outputs"][0] = {"tokens": event["outputs"][0]["tokens"][:-1], "reason": "stop"}
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert verify(path, FakeEngine()) == Difference("r100", 0, None, "stop", "length")


def test_recording_needs_an_idle_engine_and_stops_at_close(tmp_path):
    engine = FakeEngine()
    engine.add_request([1], SamplingParams(max_tokens=1))
    with RunRecorder(tmp_path / "x") as recorder, pytest.raises(RecordError, match="idle engine"):
        recorder.attach(engine)
    assert engine.listeners == []
    engine, _ = record(tmp_path / "y")
    assert engine.listeners == []
    assert list(read(tmp_path / "y"))[-1] == {"kind": "end", "step": 5}


def test_a_run_that_died_replays_up_to_its_last_line(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    text = path.read_text()
    path.write_text(text[: text.index('"done"') + 20])  # cut within a line
    assert [event["kind"] for event in read(path)] == ["run", "add", "add", "add"]
    assert len(replay(path, FakeEngine())) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b'{"kind": "run"', "no complete line"),
        (b'{"kind": "add"}\n', "not a recording of version 1"),
        (b'{"kind": "run", "version": 2}\n', "not a recording of version 1"),
        (b'{"kind": "run", "version": 1}\nx\n', ":2: not JSON"),
        (b'{"kind": "run", "version": 1}\n{"kind": "ad"}\n', ":2: unknown event 'ad'"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_invalid_recording_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        list(read(path))


def test_a_command_at_a_step_the_engine_never_reaches_is_an_error(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    text = path.read_text().replace('{"kind": "abort", "step": 4', '{"kind": "abort", "step": 40')
    path.write_text(text)
    with pytest.raises(RecordError, match="went idle at step"):
        replay(path, FakeEngine())
