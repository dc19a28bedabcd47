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
from scrape import Writer

from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.wandb import WandbSink, step_row
from megatron_infer.errors import ConfigError

MEGATRON_KEYS = """inference_step step_time_s waiting_queue_len total_requests_dict_size total_blocks
allocated_blocks active_unique_blocks allocated_utilization active_utilization active_request_count
paused_request_count block_count_avail active_token_count total_request_count max_requests prefix_cache_hits
prefix_cache_blocks_matched""".split()


def row(step: int = 7) -> dict[str, float]:
    figures = EngineSnapshot(
        born=0.0,
        state="running",
        weight_version=0,
        num_waiting=1,
        num_running=4,
        num_paused=1,
        blocks_free=25,
        blocks_cached=5,
        prefix_hits=2,
        prefix_hit_tokens=50,
    )
    step_s = {"step": step, "seconds": 0.02, "num_tokens": 20, "num_requests": 6}
    return step_row(figures, **step_s, num_blocks=40, num_active_blocks=6, block_size=16)


def test_a_row_has_exactly_megatrons_keys():
    metrics = row()
    assert set(metrics) == {f"inference/{name}" for name in MEGATRON_KEYS}
    assert metrics["inference/inference_step"] == 7
    assert metrics["inference/allocated_utilization"] == 25.0
    assert metrics["inference/active_utilization"] == 15.0 and metrics["inference/prefix_cache_blocks_matched"] == 3


def test_rows_are_drawn_over_the_inference_step():
    writer = Writer()
    WandbSink(writer).write(row(step=3))
    assert writer.metrics == [("inference/inference_step", None), ("inference/*", "inference/inference_step")]
    assert writer.rows == [row(step=3)]


def test_steps_go_on_from_the_runs_summary():
    writer = Writer({"inference/inference_step": 100})
    WandbSink(writer).write(row(step=3))
    assert writer.rows[0]["inference/inference_step"] == 103


def test_a_console_line_is_written_without_a_writer(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_infer"):
        WandbSink(None).write(row())
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


@pytest.mark.long
def test_an_offline_wandb_run_holds_every_row(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path))
    try:
        sink = WandbSink(wandb)
        for step in (5, 10):
            sink.write(row(step))
        assert WandbSink(wandb).offset == 10  # a second engine in the same run continues its steps
    finally:
        run.finish()
    (path,) = glob.glob(str(tmp_path / "wandb" / "offline-run-*" / "*.wandb"))
    expected = [row(step=5), row(step=10)]
    deadline = time.monotonic() + 30  # wandb's process writes the file, on a busy machine after finish()
    while read_rows(path) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert read_rows(path) == expected
