"""A model's MTP layer drafts: its hidden states are megatron-core's, and what has none is refused."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import pytest
import torch
from drafters import MOE, MTP, VOCAB, check_all_kept, guessing, knowing
from engines import BASE, make_engine
from model_kinds import LATENT, make_model
from test_same_answer import run, workload
from test_speculative import shown

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import AdoptionError, ConfigError
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.pipelines.config import PipelineConfig
from megatron_infer.runner.speculative.model_drafter import LowTokens
from megatron_infer.runner.speculative.mtp import MTPModel
from megatron_infer.testing.inspect import inspect

drafting = partial(make_engine, draft="mtp")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return knowing()


@pytest.fixture(scope="module")
def guesser() -> torch.nn.Module:
    return guessing()


SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "bfloat16": {"params_dtype": torch.bfloat16},
    "experts": MOE,
    "learned positions, biases, LayerNorm": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    "two layers, of which the first drafts": {"mtp_num_layers": 2},
    "latents": LATENT,
    "tied, one kv head": {"share_embeddings_and_output_weights": True, "num_query_groups": 1},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_hidden_states_are_those_of_megatron_cores_layer(kind, monkeypatch):
    """Of drafts too, which the layer computes from its own hidden states; over chunks, prefix hits and forks."""
    model = guessing(**SETTINGS[kind])
    seen: list[tuple[list[int], int, torch.Tensor]] = []
    guessed = 0
    """Tokens of the step whose hidden state before them is the layer's own."""
    hidden, follow = MTPModel.hidden, MTPModel.follow

    def note(self, batch):
        nonlocal guessed
        out_TD = hidden(self, batch)
        pool, rows, positions = self._rows.token_pool, batch.views.mirror["token_row"], batch.positions_T
        for row, position, one_D in zip(rows.tolist(), positions.tolist(), out_TD, strict=True):
            seen.append((pool[row, : position + 1].tolist(), guessed, one_D.clone()))
        guessed += 1
        return out_TD

    def begin(self, batch, hidden_TD):
        nonlocal guessed
        guessed = 0
        follow(self, batch, hidden_TD)

    monkeypatch.setattr(MTPModel, "hidden", note)
    monkeypatch.setattr(MTPModel, "follow", begin)
    prompts, _ = workload("greedy")
    params = SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=12, ignore_eos=True)
    settings = {"prefix": "lru", "max_tokens": 24, "enable_chunked_prefill": True}
    engine = drafting(model, speculative=MTP | {"num_speculative_tokens": 2}, **settings)
    for prompt in prompts:
        engine.generate([prompt], params)
    assert engine.stats().counters["prefix_hits"] > 0
    tolerance = 0.15 if model.config.params_dtype == torch.bfloat16 else 1e-4
    for own in (0, 1):
        of_kind = [(tokens, out_D) for tokens, count, out_D in seen if count == own]
        for tokens, out_D in random.Random(0).sample(of_kind, 8):
            wanted_D = reference(model, tokens, guessed=own)[-1]
            torch.testing.assert_close(out_D, wanted_D, rtol=tolerance, atol=tolerance)


def reference(model: torch.nn.Module, tokens: list[int], *, guessed: int = 0) -> torch.Tensor:
    """megatron-core's own layer over a sequence -> its hidden states [S, D]; each token with the model's hidden state
    before it, the last `guessed` with the layer's own, and the first with zeros."""
    ids, at = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    layer = model.mtp.layers[0]
    with torch.no_grad():
        embedded = model.embedding(input_ids=ids, position_ids=at)
        rotary = None  # with latent attention each layer has its own
        if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
            rotary = model.rotary_pos_emb(len(tokens))
        hidden = model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        common = {"decoder_input": embedded, "attention_mask": None, "rotary_pos_emb": rotary}
        out = layer._proj_and_transformer_layer(hidden_states=before, **common)
        for place in range(len(tokens) - guessed, len(tokens)):
            before[place] = out[place - 1]
            out = layer._proj_and_transformer_layer(hidden_states=before, **common)
    return out.squeeze(1)


def test_an_mtp_layers_experts_are_compared_again_only_when_weights_change():
    """Like the model's, they are watched: what kernels cached by their addresses lives until an update."""
    model = guessing(**MOE)
    engine = drafting(model)
    grouped = inspect(engine).adopted.heads.experts.grouped
    grouped.remember("derived", 1)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert "derived" in grouped.remembered
    with torch.no_grad():
        model.mtp.layers[0].transformer_layer.mlp.experts.local_experts[0].linear_fc2.weight.mul_(2)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert "derived" not in grouped.remembered and engine.weight_version == 1


def test_training_stays_as_it_is(guesser):
    tokens, at = torch.arange(30)[None] + 5, torch.arange(30)[None]

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        guesser.zero_grad()
        loss = guesser(tokens, at, None, labels=tokens).mean()
        loss.backward()
        return loss.detach(), [one.grad.clone() for one in guesser.parameters() if one.grad is not None]

    keys, (loss, grads) = list(guesser.state_dict()), step()
    engine = drafting(guesser)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    after, after_grads = step()
    assert list(guesser.state_dict()) == keys and torch.equal(loss, after)
    assert len(grads) == len(list(guesser.parameters()))
    assert all(map(torch.equal, grads, after_grads))


@pytest.mark.parametrize("part", [4, 2, 1])
def test_drafts_are_among_the_lowest_tokens_where_those_are_drawn(model, monkeypatch, part):
    """A quarter of the output layer is read, half of it or all, and drafts are what they were."""
    counts, first_logits = [], MTPModel.first_logits

    def counted(self: MTPModel, hidden: torch.Tensor, ops: Any, count: int) -> torch.Tensor | None:
        counts.append(count)
        return first_logits(self, hidden, ops, count)

    monkeypatch.setattr(MTPModel, "first_logits", counted)
    settings = {"max_tokens": 80, "ignore_eos": True, "allowed_token_ids": range(VOCAB // part - 9, VOCAB // part)}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, **settings)
        engine = drafting(model)
        assert shown(engine.generate([[5, 6, 7], [9]], params)) == shown(
            make_engine(model).generate([[5, 6, 7], [9]], params)
        )
        check_all_kept(engine)
    assert set(counts) == ({VOCAB // part} if part > 1 else set())


def test_low_tokens_are_left_within_a_few_other_ones():
    low = LowTokens(VOCAB)
    assert low.count is None
    low.saw([3] * 5000)
    assert low.count == VOCAB // 4
    low.saw([VOCAB // 3] * 12)
    assert low.count == VOCAB // 2
    low.saw([VOCAB - 1] * 12)
    assert low.count is None


@pytest.mark.parametrize("allowed", [range(9), range(VOCAB - 9, VOCAB)])
def test_rejection_among_the_lowest_tokens_draws_what_is_allowed(model, allowed):
    """Requests of both kinds in one step; those of high tokens have no draft that they could draw."""
    engine = drafting(model, speculative=MTP | {"verification": "residual"})
    low = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True, allowed_token_ids=range(9))
    engine.generate([[5, 6, 7], [9]], low)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed)
    for output in engine.generate([[5, 6, 7], [9], [11]], [params, low, params]):
        assert output.error is None and len(output.outputs[0].token_ids) in (40, 60)
        assert set(output.outputs[0].token_ids) <= {*range(9), *allowed}


@pytest.mark.long
def test_drafts_follow_what_is_drawn_to_other_tokens(model):
    engine = drafting(model)
    for low in (0, VOCAB // 2):
        allowed = range(low, low + 9)
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, allowed_token_ids=allowed)
        engine.generate([[5, 6, 7]], params)
        engine.generate([[8]], params)
    before = engine.spec_decode_metrics().num_drafted - engine.spec_decode_metrics().num_accepted
    engine.generate([[9]], params)
    found = engine.spec_decode_metrics()
    assert found.num_drafted - found.num_accepted == before, "drafts are still among the tokens drawn long ago"


def test_a_synthetic_acceptance_pays_for_the_layers_steps(guesser, monkeypatch):
    calls, hidden = [], MTPModel.hidden
    monkeypatch.setattr(MTPModel, "hidden", lambda self, batch: calls.append(batch) or hidden(self, batch))
    engine = drafting(guesser, speculative=MTP | {"synthetic_acceptance_rate": 1.0})
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=21, ignore_eos=True))
    found = engine.spec_decode_metrics()
    assert found.num_accepted == found.num_drafted == len(calls) == 16


def test_keys_in_fp8_leave_hidden_states_as_they_are(model):
    engine = drafting(model, kv_cache_dtype="fp8_e4m3")
    plain = make_engine(model, kv_cache_dtype="fp8_e4m3")
    assert run(engine, "sampled") == run(plain, "sampled")
    check_all_kept(engine)
    # four times 16 bytes for keys and values of a token, and 256 of fp32 for its hidden state
    assert engine.sizes.draft_block_bytes == 16 * (64 + 256)


def test_what_has_no_mtp_layer_is_refused_by_name(model):
    for kind in ("attention", "hybrid"):
        other = make_model(kind, vocab_size=VOCAB)
        with pytest.raises(ConfigError, match=r"this model has none \(mtp_num_layers\); take method 'ngram'"):
            drafting(other)
    with pytest.raises(ConfigError, match="leave 'draft' or 'mtp' out"):
        InferenceConfig(speculative={"method": ("mtp", "draft"), "draft_model": "small"})
    with pytest.raises(ConfigError, match="draft_model is 'small' with method 'mtp'"):
        InferenceConfig(speculative={"method": "mtp", "draft_model": "small"})
    config = InferenceConfig(speculative=MTP)
    assert InferenceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_commands_serve_a_checkpoint_with_an_mtp_layer(tmp_path, capsys, monkeypatch):
    """And refuse one without before its weights are read."""
    from megatron_infer.cli.main import main
    from megatron_infer.engine import llm

    save_checkpoint(knowing(), tmp_path / "with")
    save_checkpoint(make_model("attention", vocab_size=VOCAB), tmp_path / "without")
    assert main(["plan", str(tmp_path / "with"), "--speculative", "mtp", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["draft_block_bytes"]["value"] * 3 == sizes["block_bytes"]["value"] * 2
    tree = {"model_path": str(tmp_path / "with"), "speculative_method": "mtp", "max_length": 128}
    resolved = PipelineConfig(**tree).resolved
    assert resolved.sizes.draft_block_bytes * 3 == resolved.sizes.block_bytes * 2
    assert resolved.estimate.cache == resolved.sizes.kv_bytes
    served = llm.LLM(str(tmp_path / "with"), config={**BASE, "speculative": MTP}, dtype="float32")
    served.generate([[5, 6, 7]], SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True))
    check_all_kept(served.engine)
    monkeypatch.setattr(llm, "build_model", lambda *_, **__: pytest.fail("the weights were read"))
    for config in ({**BASE, "speculative": MTP}, InferenceConfig(**BASE, speculative=MTP)):
        with pytest.raises(ConfigError, match="this model has none"):
            llm.LLM(str(tmp_path / "without"), config=config)
    with pytest.raises(ConfigError, match="this model has none"):
        PipelineConfig(**tree | {"model_path": str(tmp_path / "without")})
    assert main(["plan", str(tmp_path / "without"), "--speculative", "mtp"]) != 0
    assert "this model has none" in capsys.readouterr().err


def test_a_layer_that_is_not_known_is_refused_by_name():
    model = guessing()
    model.mtp.layers[0].hnorm.register_forward_hook(lambda *_: None)
    make_engine(model).generate([[5, 6]], SamplingParams(max_tokens=2))  # nothing drafts with it
    with pytest.raises(AdoptionError, match=r"mtp.layers.0.hnorm: has a forward hook"):
        drafting(model)
    model = guessing()
    engine = drafting(model)
    model.mtp.layers[0].transformer_layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(AdoptionError, match=r"mtp.layers.0.transformer_layer.mlp: has a forward hook"):
        engine.generate([[5, 6]], SamplingParams(max_tokens=2))
