"""A model's MTP layer drafts: the same answers, its hidden states are megatron-core's, and what has none is refused.

The model that knows: one decoder layer, and an MTP layer that is the same layer and reads the token alone. It predicts
what the model draws wherever its keys and values are right.
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import suspending, tokens_of
from model_kinds import make_model, prefix_caching
from test_draft_model import OTHERS, check_adaptive, check_all_kept, check_feature, check_random_events, check_saved
from test_same_answer import BASE, make_engine, run, workload
from test_speculative import WAYS, ask, shown

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import AdoptionError, ConfigError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.pipelines.config import PipelineConfig
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.runner.speculative.model_drafter import LowTokens, ModelDrafter
from megatron_infer.runner.speculative.mtp import MTPModel
from megatron_infer.testing.inspect import inspect

VOCAB = 128
MTP: dict[str, Any] = {"method": "mtp", "adaptive": False}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}


def guessing(**settings: Any) -> torch.nn.Module:
    """A model with an MTP layer of random weights."""
    return make_model("attention", **{"vocab_size": VOCAB, "mtp_num_layers": 1} | settings)


def knowing(*, num_layers: int = 1, **settings: Any) -> torch.nn.Module:
    """The model that knows. Its layers before the last one add nothing."""
    model = guessing(num_layers=num_layers, **settings)
    layer, width = model.mtp.layers[0], model.config.hidden_size
    *before, last = model.decoder.layers
    with torch.no_grad():
        for one in before:
            one.self_attention.linear_proj.weight.zero_()
            one.mlp.linear_fc2.weight.zero_()
        words = model.embedding.word_embeddings.weight
        words.div_(words.square().mean(1, keepdim=True).sqrt())
        words.mul_((1 - 1e-5) ** 0.5)  # enorm with weights of one leaves them as they are
        layer.enorm.weight.fill_(1)
        layer.eh_proj.weight.zero_()
        layer.eh_proj.weight[:, :width] = torch.eye(width)  # the embedding comes first
        layer.transformer_layer.load_state_dict(last.state_dict())
        layer.final_layernorm.load_state_dict(model.decoder.final_layernorm.state_dict())
    return model


def drafting(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    """An engine whose MTP layer drafts; settings: those of `test_same_answer.make_engine`."""
    settings = {**BASE, "speculative": MTP, **settings}
    settings.pop("order", None)
    if "prefix" in settings:
        settings |= prefix_caching("attention", settings.pop("prefix"))
    if (pool := settings.pop("pool_blocks", None)) is not None:
        block = InferenceConfig(**BASE, speculative=MTP).resolve(adopt(model).shape).block_bytes / 2**30
        paused = settings.pop("paused_blocks", 0)
        settings |= {"buffer_size_gb": (pool + 1.25) * block}
        settings |= {"paused_buffer_size_gb": (paused + 0.25) * block if paused else None}
    return DynamicInferenceEngine(model, InferenceConfig(**settings))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return knowing()


@pytest.fixture(scope="module")
def guesser() -> torch.nn.Module:
    return guessing()


@pytest.fixture(scope="module")
def expected(model) -> dict[str, list[list[int]]]:
    engine = make_engine(model, "attention")
    return {drawing: run(engine, drawing) for drawing in ("greedy", "sampled")}


@pytest.mark.parametrize("feature", OTHERS)
def test_an_mtp_layer_like_the_model_is_accepted_entirely_with_the_feature(model, expected, feature):
    """So its keys and values are right wherever blocks are shared, cut, paused, evicted or swapped."""
    check_feature(partial(drafting, model), expected, feature)


@pytest.mark.parametrize("way", WAYS)
def test_a_random_mtp_layer_changes_no_answer(way):
    model = guessing(**MOE)
    engine = drafting(model, overlap=True)
    assert shown(ask(engine, WAYS[way])) == shown(ask(make_engine(model, "attention"), WAYS[way]))
    found = engine.spec_decode_metrics()
    assert found.num_accepted < found.num_drafted and found.seconds_drafting > 0


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
        rotary = model.rotary_pos_emb(len(tokens)) if model.position_embedding_type == "rope" else None
        hidden = model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        common = {"decoder_input": embedded, "attention_mask": None, "rotary_pos_emb": rotary}
        out = layer._proj_and_transformer_layer(hidden_states=before, **common)
        for place in range(len(tokens) - guessed, len(tokens)):
            before[place] = out[place - 1]
            out = layer._proj_and_transformer_layer(hidden_states=before, **common)
    return out.squeeze(1)


@pytest.mark.parametrize("mode", ["persist", "recompute", "offload"])
def test_suspends_keep_keys_values_and_hidden_states(model, guesser, expected, mode):
    """Of the model that guesses, drafts are the same ones as without the suspends."""
    work = list(zip(*workload("sampled"), strict=True))
    for one in (model, guesser):
        plain = drafting(one, prefix="lru")
        engines.run(plain, work)
        engine = drafting(one, overlap=mode == "offload", prefix="lru")
        outputs = engines.run(engine, work, suspending(mode, 2, 5))
        if one is model:
            assert tokens_of(outputs) == expected["sampled"]
            check_all_kept(engine)
        if mode != "recompute":  # which draws a token where it computes a sequence again, without drafts
            assert engine.spec_decode_metrics().num_accepted == plain.spec_decode_metrics().num_accepted


@pytest.mark.parametrize("reader", ["same", "other blocks", "without"])
def test_saved_requests_bring_the_mtp_layers_memory(model, tmp_path, reader):
    settings = {"same": {}, "other blocks": {"block_size_tokens": 32}, "without": {"speculative": None}}
    second = drafting(model, **settings[reader])
    check_saved(make_engine(model, "attention"), drafting(model), second, tmp_path / "saved")


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_a_weight_update_renews_the_mtp_layer(exact):
    model = knowing()
    prompts, _ = workload("greedy")
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True, logprobs=1)
    plain, engine = make_engine(model, "attention", batch_invariant=exact), drafting(model, batch_invariant=exact)
    assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))
    with torch.no_grad():  # the trainer steps: the model and its MTP layer alike
        for layer in (model.decoder.layers[0], model.mtp.layers[0].transformer_layer):
            layer.mlp.linear_fc2.weight.mul_(1.5)
        model.output_layer.weight.add_(0.1)
    assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))
    check_all_kept(engine)
    version = engine.weight_version
    with torch.no_grad():  # the MTP layer alone
        model.mtp.layers[0].transformer_layer.mlp.linear_fc2.weight.mul_(-1)
    assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))
    assert engine.weight_version == version + 1 and engine.spec_decode_metrics().acceptance_rate < 1


def test_an_mtp_layers_experts_are_compared_again_only_when_weights_change():
    """Like the model's, they are watched: what kernels cached by their addresses lives until an update."""
    model = guessing(**MOE)
    engine = drafting(model)
    grouped = inspect(engine).adopted.heads.experts.grouped
    grouped.remember("derived", 1)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert grouped.remembered
    with torch.no_grad():
        model.mtp.layers[0].transformer_layer.mlp.experts.local_experts[0].linear_fc2.weight.mul_(2)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert not grouped.remembered and engine.weight_version == 1


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


def test_rejection_keeps_a_layer_like_the_model(model):
    prompts, _ = workload("sampled")
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True)
    engine = drafting(model, speculative=MTP | {"verification": "residual"})
    engine.generate(prompts, params)
    assert engine.spec_decode_metrics().acceptance_rate > 0.99


def test_adaptive_depth_stops_where_drafts_do_not_pay(guesser):
    check_adaptive(drafting(guesser, speculative={"method": "mtp"}), drafting(guesser))


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
            drafting(model, speculative=None).generate([[5, 6, 7], [9]], params)
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


def test_n_grams_come_first_where_both_are_asked_for(model):
    prompts = [[7, 8, 9, 10] * 5, [20, 21, 22] * 6, [90]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = drafting(model, speculative=MTP | {"method": ("ngram", "mtp")})
    assert shown(engine.generate(prompts, params)) == shown(make_engine(model, "attention").generate(prompts, params))
    assert 0.2 < engine.spec_decode_metrics().acceptance_rate <= 1


def test_a_step_that_fails_leaves_nothing_for_the_next_one(model, monkeypatch):
    prompts, params = workload("sampled")
    engine, forward, calls = drafting(model), ModelDrafter._forward, []

    def fail_once(self, plan, *table_writes):
        calls.append(plan)
        if len(calls) == 4:
            raise RuntimeError("this step fails")
        return forward(self, plan, *table_writes)

    monkeypatch.setattr(ModelDrafter, "_forward", fail_once)
    outputs = engine.generate(prompts, params, on_error="return")
    assert any(output.error for output in outputs)
    before = engine.spec_decode_metrics()
    assert run(engine, "sampled") == run(make_engine(model, "attention"), "sampled")
    after = engine.spec_decode_metrics()
    assert after.num_accepted - before.num_accepted == after.num_drafted - before.num_drafted > 0


def test_memory_counts_keys_values_and_hidden_states(model):
    engine, alone = drafting(model), make_engine(model, "attention")
    # heads of 16, two for keys and two for values: 256 bytes of fp32 a token, and 256 of a hidden state of 64
    assert engine.sizes.draft_block_bytes == 2 * alone.sizes.block_bytes == engine.sizes.block_bytes * 2 // 3
    rows = {row.name: row.how for row in engine.sizes.table()}
    assert rows["block_bytes"].endswith("+ draft_block_bytes")
    (tensor,) = OverlapTextGenerationPipeline.of_engine(engine).draft_kv_blocks
    assert tensor.nbytes == engine.sizes.draft_block_bytes * engine.sizes.num_blocks


def test_keys_in_fp8_leave_hidden_states_as_they_are(model):
    engine = drafting(model, kv_cache_dtype="fp8_e4m3")
    plain = make_engine(model, "attention", kv_cache_dtype="fp8_e4m3")
    assert run(engine, "sampled") == run(plain, "sampled")
    check_all_kept(engine)
    # four times 16 bytes for keys and values of a token, and 256 of fp32 for its hidden state
    assert engine.sizes.draft_block_bytes == 16 * (64 + 256)


def test_what_has_no_mtp_layer_is_refused_by_name(model):
    for kind in ("attention", "hybrid"):
        other = make_model(kind, vocab_size=VOCAB)
        with pytest.raises(ConfigError, match=r"this model has none \(mtp_num_layers\); take method 'ngram'"):
            DynamicInferenceEngine(other, InferenceConfig(**BASE, speculative=MTP))
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
    make_engine(model, "attention").generate([[5, 6]], SamplingParams(max_tokens=2))  # nothing drafts with it
    with pytest.raises(AdoptionError, match=r"mtp.layers.0.hnorm: has a forward hook"):
        drafting(model)
    model = guessing()
    engine = drafting(model)
    model.mtp.layers[0].transformer_layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(AdoptionError, match=r"mtp.layers.0.transformer_layer.mlp: has a forward hook"):
        engine.generate([[5, 6]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("seed", range(4))
def test_an_mtp_layer_like_the_model_is_accepted_entirely_through_random_events(model, expected, seed):
    check_random_events(partial(drafting, model), expected["sampled"], seed)
