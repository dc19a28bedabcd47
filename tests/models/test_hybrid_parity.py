"""A hybrid model built from a Hugging Face directory computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import CASES, random_hybrid
from paged_step import worst_difference
from plain_forward import full_logits

from megatron_infer.config.model_shape import StateShape
from megatron_infer.errors import ConfigError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source

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


def test_correction_biases_choose_the_experts(tmp_path):
    model = random_hybrid("nemotron_h_experts")
    before = expected_logits(model, IDS)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(-3 * buffer)
    after = expected_logits(model, IDS)
    assert (after - before).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert (full_logits(build_model(open_source(tmp_path)), IDS) - after).abs().max() < 1e-4


def test_time_steps_are_clamped(tmp_path):
    """The limits of the cases above matter: without them the logits would be others."""
    model = random_hybrid("mamba2_limits")
    limited = expected_logits(model, IDS)
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = (0.0, float("inf"))
    assert (expected_logits(model, IDS) - limited).abs().max() > 0.1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_the_shape_of_a_plan_is_that_of_the_live_model(case, tmp_path):
    """Sizes of `megatron-infer plan`, which builds nothing, are those of an engine: parameters and states included."""
    random_hybrid(case).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    planned = shape_of(source.config(), dtype="float32")
    live = build_model(source)
    assert planned == adopt(live).shape
    assert planned.state.num_layers == source.config().hybrid.pattern.count("M")


def test_ranks_share_heads_and_groups(tmp_path):
    random_hybrid("bamba").save_pretrained(tmp_path)
    plan = open_source(tmp_path).config()
    shape = shape_of(plan, dtype="bfloat16", tensor_parallel_size=2)
    assert (shape.num_query_heads, shape.num_kv_heads) == (3, 1)
    assert shape.state == StateShape(
        num_layers=2, conv_shape=(6 * 8 + 2 * 16, 4), ssm_shape=(6, 8, 16), conv_dtype="bfloat16", ssm_dtype="float32"
    )
    with pytest.raises(ConfigError, match="must divide the 2 Mamba groups"):
        shape_of(plan, dtype="float32", tensor_parallel_size=3)
    random_hybrid("mamba2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must divide the 12 Mamba heads"):
        shape_of(open_source(tmp_path).config(), dtype="float32", tensor_parallel_size=5)


def test_bfloat16_weights_are_the_rounded_ones_and_correction_biases_stay_exact(tmp_path):
    model = random_hybrid("nemotron_h_experts")
    model.save_pretrained(tmp_path)
    exact = build_model(open_source(tmp_path))
    rounded = build_model(open_source(tmp_path), dtype="bfloat16")
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    biases = [(name, a, b) for (name, a), b in zip(exact.named_buffers(), rounded.buffers(), strict=True)]
    found = [torch.equal(a, b) and b.dtype == torch.float32 for name, a, b in biases if name.endswith("expert_bias")]
    assert found == [True, True]


def test_sharded_files_load(tmp_path):
    model = random_hybrid("granite_experts")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    got = full_logits(build_model(open_source(tmp_path)), IDS)
    assert (got - expected_logits(model, IDS)).abs().max() < 1e-4


def test_padded_vocabulary_entries_are_zero_with_scaled_embeddings(tmp_path):
    model = random_hybrid("granite_factors_tied")
    model.save_pretrained(tmp_path)
    built = build_model(open_source(tmp_path), vocab_multiple=64)
    assert built.vocab_size == 192
    assert built.embedding.word_embeddings.weight[131:].abs().sum() == 0
    assert (full_logits(built, IDS)[:, :131] - expected_logits(model, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_paged_steps_compute_what_the_full_forward_does(case, tmp_path):
    """Chunks and decodes in mixed steps, states in slots: biases, limits and epsilons reach the paged path too."""
    random_hybrid(case).save_pretrained(tmp_path)
    model = build_model(open_source(tmp_path))
    assert worst_difference(model, adopt(model)) < 1e-4
