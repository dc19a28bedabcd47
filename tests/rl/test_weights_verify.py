"""A wrong weight is found and named, in a live tensor or in a copy derived from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_weights import answer, hybrid, make_engine, state_of

from megatron_infer.errors import StaleCache, WeightUpdateError
from megatron_infer.rl.updates import ReshardSource, apply, verify_update
from megatron_infer.testing.tiny import tiny_gpt


def spoils() -> dict[str, tuple[str, Any]]:
    """Fault -> (tensor, function that plants it)."""
    square = "decoder.layers.1.self_attention.linear_proj.weight"
    return {
        "skipped": ("decoder.layers.0.mixer.A_log", lambda live: live.add_(0.25)),
        "transposed": (square, lambda live: live.copy_(live.t().clone())),
        "rows shifted": ("decoder.layers.2.mlp.linear_fc1.weight", lambda live: live.copy_(live.roll(1, 0))),
        "halves exchanged": ("decoder.layers.2.mlp.linear_fc1.weight", lambda live: live.copy_(live.roll(96, 0))),
        "one bit": ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight", flip),
        "a buffer": ("decoder.layers.3.mlp.router.expert_bias", lambda live: live[1].add_(1.0)),
        "sign of zero": ("decoder.layers.0.mixer.conv1d.bias", lambda live: live.neg_()),
    }


def flip(live: torch.Tensor) -> None:
    live.view(torch.int32)[3, 5] ^= 1


@pytest.mark.parametrize("fault", spoils())
def test_a_wrong_tensor_is_named_for_every_kind_of_source(fault: str):
    new = hybrid(seed=1)
    with torch.no_grad():
        new.decoder.layers[0].mixer.conv1d.bias.zero_()
    engine, (name, spoil) = make_engine(hybrid(seed=2)), spoils()[fault]
    for source in (state_of(new), new, ReshardSource(new)):
        apply(engine, source)
        found = verify_update(engine, source)
        assert found.num_compared == found.num_tensors == len(state_of(new))
        assert {"packed weights", "scan weights"} <= set(found.derived)
        with torch.no_grad():
            spoil(engine.model.state_dict(keep_vars=True)[name].detach())
        with pytest.raises(WeightUpdateError, match=name.replace(".", r"\.")) as error:
            verify_update(engine, source)
        assert error.value.tensor == name
        assert found.checksum != verify_update_alone(engine)


def verify_update_alone(engine: Any) -> str:
    """The engine's own checksum, after it has accepted its present tensors."""
    engine.refresh_weights()
    return verify_update(engine).checksum


def test_a_derived_copy_that_missed_the_update_is_named():
    new, engine = hybrid(seed=1), make_engine(hybrid(seed=2))
    apply(engine, new)
    verify_update(engine, new)
    with torch.no_grad():
        engine.model.decoder.layers[0].mixer.A_log.data.add_(0.5)
        new.decoder.layers[0].mixer.A_log.data.add_(0.5)
    with pytest.raises(StaleCache, match=r"scan weights \(decoder\.layers\.0\.mixer\.A_log\)"):
        verify_update(engine, new)


def test_a_source_that_lacks_a_tensor_does_not_compare_equal():
    new, engine = hybrid(seed=1), make_engine(hybrid(seed=2))
    apply(engine, new)
    for part in (list(state_of(new).items())[:-1], []):
        with pytest.raises(WeightUpdateError, match="no value"):
            verify_update(engine, dict(part))
        with pytest.raises(WeightUpdateError, match="no value"):
            verify_update(engine, iter(part))
    assert verify_update(engine, dict(part), strict=False).num_compared == 0


def test_trainers_with_other_padding_give_the_same_tokens():
    """kv groups and vocabulary rows of zeros may be added and dropped; others may not be dropped."""
    small = tiny_gpt(num_attention_heads=6, num_query_groups=3, kv_channels=16, seed=1)
    large = tiny_gpt(num_attention_heads=8, num_query_groups=4, kv_channels=16, seed=2, vocab_size=160)
    large.true_vocab_size = 128
    engine, back = make_engine(large), make_engine(tiny_gpt(num_attention_heads=6, num_query_groups=3, kv_channels=16))
    expected = answer(make_engine(small))
    for target, trainer in ((engine, small), (back, large)):
        source = ReshardSource(trainer)
        apply(target, source)
        verify_update(target, source)
        tokens, logprobs = answer(target)
        assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-6)
    with torch.no_grad():
        large.decoder.layers[1].self_attention.linear_qkv.weight[-1, -1] = 1.0
    with pytest.raises(
        WeightUpdateError, match=r"layers\.1\.self_attention\.linear_qkv\.weight has kv groups that .* not zeros"
    ):
        apply(back, ReshardSource(large))
    assert answer(back)[0] == expected[0]
