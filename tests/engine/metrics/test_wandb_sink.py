"""The wandb sink: Megatron's keys in a real offline run, and writers that cannot log refused."""

from __future__ import annotations

import glob
import json
import logging
import pathlib
import struct
import time
import types

import pytest

from megatron_infer.engine.metrics.engine_snapshot import StepSnapshot
from megatron_infer.engine.metrics.wandb import WandbSink
from megatron_infer.errors import ConfigError


class Writer:
    def __init__(self, summary=None):
        self.rows, self.metrics, self.summary = [], [], summary or {}

    def log(self, data):
        self.rows.append(data)

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))


MEGATRON_KEYS = """inference_step step_time_s waiting_queue_len total_requests_dict_size total_blocks
allocated_blocks active_unique_blocks allocated_utilization active_utilization active_request_count
paused_request_count block_count_avail active_token_count total_request_count max_requests prefix_cache_hits
prefix_cache_blocks_matched""".split()


def snapshot(*, step: int = 7) -> StepSnapshot:
    return StepSnapshot(
        step=step,
        step_time_s=0.02,
        waiting_queue_len=1,
        total_requests_dict_size=6,
        total_blocks=40,
        allocated_blocks=10,
        active_unique_blocks=6,
        active_request_count=4,
        paused_request_count=1,
        block_count_avail=30,
        active_token_count=20,
        total_request_count=5,
        max_requests=16,
        prefix_cache_hits=2,
        prefix_cache_blocks_matched=3,
    )


def test_snapshot_has_exactly_megatrons_keys():
    metrics = snapshot().as_metrics()
    assert set(metrics) == {f"inference/{name}" for name in MEGATRON_KEYS}
    assert metrics["inference/inference_step"] == 7
    assert metrics["inference/allocated_utilization"] == 25.0
    assert metrics["inference/active_utilization"] == 15.0


def test_rows_are_drawn_over_the_inference_step():
    writer = Writer()
    WandbSink(writer).write(snapshot(step=3))
    assert writer.metrics == [("inference/inference_step", None), ("inference/*", "inference/inference_step")]
    assert writer.rows == [snapshot(step=3).as_metrics()]


def test_steps_go_on_from_the_runs_summary():
    writer = Writer({"inference/inference_step": 100})
    WandbSink(writer).write(snapshot(step=3))
    assert writer.rows[0]["inference/inference_step"] == 103


def test_a_console_line_is_written_without_a_writer(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_infer"):
        WandbSink(None).write(snapshot())
    assert "step 7: 20.0 ms, 20 tokens (1,000/s), 4 active, 1 paused, 1 waiting, blocks 10/40" in caplog.text


@pytest.mark.parametrize("writer", [object(), "wandb", types.SimpleNamespace(log=print)])
def test_a_writer_that_cannot_log_is_a_value_error(writer):
    with pytest.raises(ValueError, match=r"define_metric.*pass the wandb module"):
        WandbSink(writer)


def test_the_wandb_module_without_a_run_is_refused():
    with pytest.raises(ConfigError, match=r"wandb.init\(\) first"):
        WandbSink(types.SimpleNamespace(log=print, define_metric=print, run=None))


def read_rows(path: str) -> list[dict[str, float]]:
    """History rows of a .wandb file: a 7-byte header, then a LevelDB log of protobuf records in 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    data, offset, parts, rows = pathlib.Path(path).read_bytes(), 7, b"", []
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768  # a record header never straddles two blocks
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind not in (1, 4):  # whole record, or its last piece
            continue
        record, parts = wandb_internal_pb2.Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if key.startswith("inference/")})
    return rows


def test_an_offline_wandb_run_holds_every_row(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path))
    try:
        sink = WandbSink(wandb)
        for step in (5, 10):
            sink.write(snapshot(step=step))
        assert WandbSink(wandb).offset == 10  # a second engine in the same run continues its steps
    finally:
        run.finish()
    (path,) = glob.glob(str(tmp_path / "wandb" / "offline-run-*" / "*.wandb"))
    expected = [snapshot(step=5).as_metrics(), snapshot(step=10).as_metrics()]
    deadline = time.monotonic() + 30  # wandb's process writes the file, on a busy machine after finish()
    while read_rows(path) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert read_rows(path) == expected
