"""Gaps between tokens, for any sequences that two successive steps share."""

from __future__ import annotations

import random

from megatron_infer.engine.metrics.engine_meter import EngineMeter


def test_token_gaps_are_measured_within_each_sequence():
    rng, meter, last, gaps = random.Random(2), EngineMeter(), {}, []
    drawing: list[str] = []
    for step in range(300):
        now = step * 0.25
        if rng.random() < 0.3:
            drawing = rng.sample([f"r{i}" for i in range(8)], rng.randrange(9))
        gaps += [now - last[one] for one in drawing if one in last]
        last |= dict.fromkeys(drawing, now)
        meter.tokens(list(drawing), now)
        if drawing and rng.random() < 0.1:  # its key may return for another sequence
            del last[drawing[0]]
            meter.end("stop", 1.0, [drawing[0]])
    assert (meter.itl.count, meter.itl.total) == (len(gaps), sum(gaps))


def test_finished_sequences_are_removed():
    meter = EngineMeter()
    for step in range(50):
        meter.tokens([f"r{step}"], float(step))
        meter.end("length", 1.0, [f"r{step}"])
    assert not meter._last and not meter._step_ids


def test_adapters_beyond_the_first_are_counted_under_one_name():
    meter = EngineMeter()
    for number in range(1000):
        meter.adapter_ended(f"adapter-{number}", 2)
        meter.adapter_ended("adapter-0", 1)
    figures = meter.as_figures()
    for counts, total in ((figures["adapter_requests"], 2000), (figures["adapter_tokens"], 3000)):
        assert len(counts) < 300 and sum(counts.values()) == total
        assert counts["adapter-0"] > 1000 and counts["others"] > 500
