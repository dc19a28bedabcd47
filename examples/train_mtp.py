"""Train one multi-token prediction layer over a frozen SmolLM2 on a CPU, on what the model itself says.

    python examples/train_mtp.py smollm2-mtp                       20 minutes on two cores, then what was reached
    megatron-infer serve smollm2-mtp --speculative mtp --num-speculative-tokens 1

    the model asks ──▶ it answers ──▶ its hidden states ──▶ MTP layer: least squares, then trained to say what the
      two fifths of the time             a quarter          model says one token later, the rest of the time

The layer's projection begins as the linear map that comes nearest to the model's next hidden state, and the rest of it
as nothing. Its loss is the cross entropy to the model's own distribution of the token after the next, among the tokens
that occur most, and the distance to the model's hidden state there. Nothing else of the model is trained.
Legend: S positions, R sequences, D hidden, T tokens, V vocab (those that occur most).
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_infer import LLM, InferenceConfig, SamplingParams, SpeculativeConfig, open_source
from megatron_infer.cli.loading import positive_int
from megatron_infer.engine.llm import chat_prompt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint

HELD_OUT = """
What makes a good teacher?; Tell me a short story about a cat who lives in a theatre.; Why is grass green?; How do I
prepare for an exam?; Explain how a fridge works.; Write an email to a colleague who is ill.; What is the best way
to keep plants alive?; Describe a day at the beach.
""".replace("\n", " ").split(";")
"""Questions that are asked to measure, and of which nothing is trained."""
AT_ONCE = 64
"""Sequences whose hidden states are computed together."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The model's questions and its answers."""

    sequences: list[tuple[int, list[int]]]
    """(tokens before the question, all tokens) of each."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) - num_given for num_given, tokens in self.sequences)


def sample(llm: LLM, seconds: float, *, at_once: int, max_tokens: int, seed: int) -> Answers:
    """Questions that the model asks within that time, and what it answers to them.

    A chat model that is given the beginning of a user's turn writes what users write.
    """
    engine, numbers, begun = llm.engine, itertools.count(seed * 1_000_000), time.perf_counter()
    two = (chat_prompt(llm.tokenizer, [{"role": "user", "content": word}]) for word in ("Why", "1"))
    turn = [token for token, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*two, strict=False))]
    asking: dict[str, int] = {}
    answering: set[str] = set()
    found: list[tuple[int, list[int]]] = []
    idle = at_once
    while not found or time.perf_counter() - begun < seconds:
        for number in itertools.islice(numbers, idle):
            params = SamplingParams(temperature=1.0, top_p=0.95, seed=number, max_tokens=64)
            asking[engine.add_request(turn, params, stream="final")] = number
        idle = 0
        for output in engine.step():
            number, said = asking.pop(output.request_id, None), output.outputs[0]
            if number is None:
                idle += 1
                answering.discard(output.request_id)
                found.append((len(turn), [*output.prompt_token_ids, *said.token_ids]))
                continue
            if said.text.strip().casefold() in (" ".join(one.split()).casefold() for one in HELD_OUT):
                idle += 1
                continue
            # two thirds of them as they are served in the measurement, the others with more variety
            temperature = 0.8 if number % 3 == 0 else 0.0
            params = SamplingParams(temperature=temperature, top_p=0.95, seed=number, max_tokens=max_tokens)
            question = [{"role": "user", "content": said.text.strip()}]
            answering.add(engine.add_request(chat_prompt(llm.tokenizer, question), params, stream="final"))
    for unfinished in (*asking, *answering):
        engine.abort(unfinished)
    return Answers(found, time.perf_counter() - begun)


def with_mtp_layer(name: str) -> Any:
    """The model in bfloat16 with an MTP layer that adds nothing to what its projection gives."""
    source = open_source(name)
    description = source.config()
    transformer = {**description.transformer, "mtp_num_layers": 1}
    model = build_model(replace(description, transformer=transformer), dtype="bfloat16")
    known = model.load_state_dict(build_model(source, dtype="bfloat16").state_dict(), strict=False)
    assert not known.unexpected_keys and all(key.startswith("mtp.") for key in known.missing_keys), known
    model.requires_grad_(False)
    layer = model.mtp.layers[0]
    layer.transformer_layer.load_state_dict(model.decoder.layers[-1].state_dict())
    for output in (layer.transformer_layer.self_attention.linear_proj, layer.transformer_layer.mlp.linear_fc2):
        output.weight.zero_()
    layer.final_layernorm.load_state_dict(model.decoder.final_layernorm.state_dict())
    for norm in (layer.enorm, layer.hnorm):
        norm.weight.fill_(1)
    return model


Batch = tuple[Tensor, Tensor, Tensor]
"""(tokens [R, S], the rows of the layer that count [S, R], hidden states [S, R, D])."""


class Batches:
    """Sequences of similar length with the model's final hidden states, which are computed once."""

    def __init__(self, llm: LLM, sequences: list[tuple[int, list[int]]], *, size: int) -> None:
        ordered = sorted(sequences, key=lambda one: len(one[1]))
        self.each: list[Batch] = []
        whole = SamplingParams(pooling="all", max_tokens=1, detokenize=False)  # the hidden state of each position
        for begin in range(0, len(ordered), AT_ONCE):
            together = ordered[begin : begin + AT_ONCE]
            pooled = [output.pooled for output in llm.generate([one for _, one in together], whole)]
            hidden = [torch.tensor(one, dtype=torch.bfloat16) for one in pooled]
            for first in range(0, len(together), size):
                some = together[first : first + size]
                at_S = torch.arange(len(some[-1][1]))
                tokens_RS = torch.tensor([one + [0] * (len(at_S) - len(one)) for _, one in some])
                # rows whose next token but one the model drew
                counts = [(at_S >= num_given - 2) & (at_S < len(one) - 2) for num_given, one in some]
                hidden_SRD = pad_sequence(hidden[first : first + size])
                self.each.append((tokens_RS, torch.stack(counts, dim=1), hidden_SRD))

    def forever(self, seed: int) -> Iterator[Batch]:
        """In another order each time."""
        generator = random.Random(seed)
        while True:
            yield from generator.sample(self.each, len(self.each))


@torch.no_grad()
def set_projection(model: Any, batches: Batches) -> None:
    """Least squares from the embedding of a token and the hidden state before it to the hidden state behind it."""
    layer, width = model.mtp.layers[0], model.config.hidden_size
    norm = partial(F.rms_norm, normalized_shape=(width,), eps=model.config.layernorm_epsilon)
    scale = layer.final_layernorm.weight.float()
    inputs, both = torch.zeros(2 * width, 2 * width), torch.zeros(2 * width, width)
    for tokens_RS, counts_SR, hidden_SRD in batches.each:
        at_RS = torch.arange(tokens_RS.shape[1]).expand_as(tokens_RS)
        embedded_SRD = norm(model.embedding(input_ids=tokens_RS, position_ids=at_RS).float())
        counts = counts_SR[:-1]
        x_TE = torch.cat([embedded_SRD[1:], norm(hidden_SRD.float())[:-1]], dim=-1)[counts]
        inputs += x_TE.T @ x_TE
        both += x_TE.T @ (hidden_SRD[1:].float() / scale)[counts]
    ridge = 1e-3 * inputs.diagonal().mean() * torch.eye(2 * width)
    layer.eh_proj.weight.copy_(torch.linalg.solve(inputs + ridge, both).T)


def loss_of(model: Any, batch: Batch, head_VD: Tensor, *, distance: float) -> tuple[Tensor, float]:
    """(mean loss over what a batch's model drew, share of its positions whose likeliest token is the model's).

    Row i of megatron-core's layer has hidden state i and token i + 1. It is compared with the model's hidden state of
    token i + 1, from which the model draws token i + 2.
    """
    tokens_RS, counts_SR, hidden_SRD = batch
    length = tokens_RS.shape[1]
    at_RS = torch.arange(length).expand_as(tokens_RS)
    out_SRD, _, _ = model.mtp.layers[0](
        input_ids=tokens_RS,
        position_ids=at_RS,
        hidden_states=hidden_SRD.clone(),
        attention_mask=None,
        rotary_pos_emb=model.rotary_pos_emb(length),
        embedding=model.embedding,
    )
    guess_TD, wanted_TD = out_SRD[counts_SR], hidden_SRD.roll(-1, 0)[counts_SR].clone()
    with torch.no_grad():
        wanted_TV = F.linear(wanted_TD, head_VD).float()
    guess_TV = F.linear(guess_TD, head_VD).float()
    agrees = (guess_TV.argmax(-1) == wanted_TV.argmax(-1)).float().mean().item()
    entropy = F.cross_entropy(guess_TV, wanted_TV.softmax(-1))
    return entropy + distance * F.smooth_l1_loss(guess_TD.float(), wanted_TD.float()), agrees


def train(model: Any, batches: Batches, head_VD: Tensor, seconds: float, args: argparse.Namespace) -> list[float]:
    """Train the MTP layer for that time -> the share of agreement of each step."""
    layer = model.mtp.layers[0].requires_grad_(True).train()
    weights = list(layer.parameters())
    masters = [weight.detach().float() for weight in weights]  # bfloat16 would lose small updates
    optimizer = torch.optim.AdamW(masters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    agreed: list[float] = []
    begun = last = time.perf_counter()
    for batch in batches.forever(args.seed):
        done = (time.perf_counter() - begun) / seconds
        if done >= 1 or len(agreed) == args.max_steps:
            break
        rate = min(1.0, (len(agreed) + 1) / 30) * (1 - done) ** 0.8
        optimizer.param_groups[0]["lr"] = args.lr * rate
        loss, agrees = loss_of(model, batch, head_VD, distance=args.distance)
        agreed.append(agrees)
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        if time.perf_counter() - last > 15:
            last = time.perf_counter()
            recent = statistics.mean(agreed[-20:])
            print(
                f"{last - begun:5.0f} s  step {len(agreed):5}  loss {loss.item():.3f}  agrees {recent:.3f}", flush=True
            )
    layer.requires_grad_(False).eval()
    return agreed


def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers to questions that were not trained, one at a time, with the layer and without."""
    drafting = SpeculativeConfig(method="mtp", num_speculative_tokens=args.num_speculative_tokens, adaptive=False)
    common = {"max_requests": 4, "buffer_size_gb": 0.25, "max_sequence_length": 512}
    llms = {
        name: LLM(str(directory), config=InferenceConfig(**common, speculative=one))
        for name, one in (("off", None), ("mtp", drafting))
    }
    params = SamplingParams(temperature=0.0, max_tokens=args.answer_tokens)
    asked = [
        chat_prompt(llms["off"].tokenizer, [{"role": "user", "content": " ".join(one.split())}]) for one in HELD_OUT
    ]
    rates: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(args.rounds + 1):
        answers: dict[str, list[list[int]]] = {}
        for name in list(llms) if number % 2 else list(llms)[::-1]:
            begun = time.perf_counter()
            answers[name] = [llms[name].generate([one], params)[0].outputs[0].token_ids for one in asked]
            rates[name].append(sum(map(len, answers[name])) / (time.perf_counter() - begun))
        assert answers["off"] == answers["mtp"], "other tokens with drafts"
    rates = {name: each[1:] for name, each in rates.items()}  # the first round warms up
    found = llms["mtp"].engine.spec_decode_metrics()
    assert found is not None
    pairs = zip(found.accepted_per_position, found.drafted_per_position, strict=True)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "acceptance_by_position": [round(kept / max(1, drafted), 3) for kept, drafted in pairs],
        "tokens_a_second": {name: round(rate, 1) for name, rate in medians.items()},
        "ratio": round(medians["mtp"] / medians["off"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model is written; it must not exist")
    parser.add_argument("--model", default="smollm2", help="whose layer is trained")
    parser.add_argument("--minutes", type=float, default=20.0, help="of sampling and training")
    parser.add_argument("--max-steps", type=positive_int, default=None, help="of training; None: as the time allows")
    parser.add_argument("--answers", type=Path, help="a file for the sampled answers, which is read where it exists")
    parser.add_argument("--answer-tokens", type=int, default=160, help="the most of an answer")
    parser.add_argument("--sampling-share", type=float, default=0.4, help="of the time, for sampling")
    parser.add_argument("--at-once", type=int, default=96, help="answers that are sampled together")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--num-tokens", type=int, default=4096, help="those that occur most, which are predicted")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--distance", type=float, default=1.0, help="weight of the distance between hidden states")
    parser.add_argument("--num-speculative-tokens", type=int, default=1, help="drafts a step in the measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement, whose medians count")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.directory.exists():
        raise SystemExit(f"{args.directory} exists; give a directory that does not")
    torch.manual_seed(args.seed)
    begun, seconds = time.perf_counter(), 60 * args.minutes
    sized = {"max_requests": args.at_once, "buffer_size_gb": 1.0, "max_sequence_length": 512}
    llm = LLM(
        args.model, config={**sized, "weight_dtype": "int8"}
    )  # 1.5 times as fast, and nearly the model; its hidden states, too
    if args.answers is not None and args.answers.exists():
        answers = Answers(json.loads(args.answers.read_text()), 0.0)
    else:
        share = args.sampling_share * seconds
        answers = sample(llm, share, at_once=args.at_once, max_tokens=args.answer_tokens, seed=args.seed)
        if args.answers is not None:
            args.answers.write_text(json.dumps(answers.sequences))
    print(f"{len(answers.sequences)} answers, {answers.num_tokens:,} tokens in {answers.seconds:.0f} s", flush=True)
    model = with_mtp_layer(args.model)
    batches = Batches(llm, answers.sequences, size=args.batch)
    set_projection(model, batches)
    counted = Counter(token for _, one in answers.sequences for token in one)
    most = sorted(token for token, _ in counted.most_common(args.num_tokens))
    head_VD = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    head_VD = (model.output_layer.weight if head_VD is None else head_VD)[most].detach().clone()
    spent = time.perf_counter() - begun
    print(f"hidden states computed after {spent:.0f} s; {len(counted):,} tokens occur", flush=True)
    with torch.no_grad():
        agrees = statistics.mean(loss_of(model, one, head_VD, distance=0.0)[1] for one in batches.each[::50])
    print(f"before training the likeliest token is the model's in {agrees:.3f} of positions", flush=True)
    agreed = train(model, batches, head_VD, max(seconds - spent, 1.0), args)
    print(
        f"{len(agreed)} steps; the likeliest token is the model's in {statistics.mean(agreed[-20:]):.3f} of positions"
    )
    description = open_source(args.model).config()
    transformer = {**description.transformer, "mtp_num_layers": 1}
    save_checkpoint(
        model,
        args.directory,
        tokenizer=open_source(args.model).tokenizer(),
        description=replace(description, transformer=transformer, dtype="bfloat16"),
    )
    print(json.dumps(measure(args.directory, args)))


if __name__ == "__main__":
    main()
