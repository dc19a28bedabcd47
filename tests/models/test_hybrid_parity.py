"""A hybrid model built from a Hugging Face directory computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import CASES, random_hybrid
from plain_forward import full_logits

from megatron_infer.models.build import build_model
from megatron_infer.models.sources import open_source

IDS = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def expected_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    model = random_hybrid(case)
    model.save_pretrained(tmp_path)
    expected = expected_logits(model, IDS)
    got = full_logits(build_model(open_source(tmp_path)), IDS)
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < 1e-4
