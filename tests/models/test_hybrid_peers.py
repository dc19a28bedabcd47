"""Hybrid models of transformers as a peer in tools/bench/peers.py; their answers: engine/answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hf_models import random_model

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))

import peers


@pytest.mark.long
@pytest.mark.parametrize("case", ["mamba2", "bamba"])
def test_transformers_is_measured_with_hybrids(case, tmp_path):
    """Which has no scaled dot product attention for a model without attention."""
    random_model(case).save_pretrained(tmp_path)
    report = tmp_path / "report.json"
    sizes = "--num-requests 3 --input-len 5:20 --output-len 4 --rounds 1 --dtype float32 --vs transformers".split()
    assert peers.run(peers.parse_args([str(tmp_path), *sizes, "--json", str(report)])) == 0
    assert set(json.loads(report.read_text())["engines"]) == {"megatron_infer", "transformers"}
