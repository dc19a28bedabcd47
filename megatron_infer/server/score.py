"""/v1/score: probabilities of label tokens behind a text (SGLang's), or the likeness of two texts (vLLM's)."""

from __future__ import annotations

import math
import time
import uuid
from typing import Annotated, Any

from msgspec import Meta

from megatron_infer.outputs.embeddings import params_for, vector_of
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.body_types import Body, Text, Texts, TokenIds
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import prompt_outputs, scoring_params
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.served_models import check_model, shown_name
from megatron_infer.server.server_config import ServerConfig

FIELDS = FieldTable(
    SHARED
    | {
        "temperature": refused("probabilities are those of the model", 1.0),
        "max_tokens_per_query max_tokens_per_doc": refused("a text is not cut here; send what is to be read", 0),
        "instruction": refused("put it into the texts"),
        "priority": no_effect("scores take one forward each", 0),
        "return_token_logprobs": refused("scores are probabilities; take their logarithm", False),
        "return_pooled_hidden_states": refused("use /v1/embeddings", False),
        "score_extraction_token": refused("labels are scored behind the last token"),
    }
)


class ScoreBody(Body):
    """Either query, items and label_token_ids, or two texts (lists of texts) under one of vLLM's pairs of names."""

    model: str | None = None
    query: Text | TokenIds | None = None
    items: Text | Annotated[list[Text | TokenIds], Meta(min_length=1)] | None = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool | None = None
    """Probabilities among the labels alone; otherwise among all tokens."""
    item_first: bool | None = None
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    data_1: Text | Texts | None = None
    data_2: Text | Texts | None = None


PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def score(call: Call) -> Reply:
        check_model(client, call.body.model)
        if call.body.label_token_ids is not None:
            return Reply(await _label_scores(call, client))
        return Reply(await _likeness(call, client))

    summary = "Probabilities of label tokens, or likeness of texts"
    routes.add("POST", "/v1/score", score, summary, body=ScoreBody, fields=FIELDS, statuses=GENERATION_STATUSES)


async def _label_scores(call: Call, client: EngineClient) -> dict[str, Any]:
    """The probability of every label as the token behind query and item: a row for each item."""
    body: ScoreBody = call.body
    labels = body.label_token_ids or []
    if body.query is None or body.items is None:
        raise bad_request("label_token_ids goes with query and items; give all three", "query", "missing_field")
    (query,) = await client.encode_prompts(body.query, field="query")
    items = await client.encode_prompts(body.items, field="items", add_special=False)
    limit = client.settings.max_prompts
    if len(items) * len(labels) > limit:
        text = f"{len(items)} items with {len(labels)} labels are more than {limit:,} prompts (max_prompts)"
        raise bad_request(f"items: {text}; send fewer", "items")
    # The engine scores a token as the last one of a prompt; prompts of one item share all that is before it.
    prompts = [item + query if body.item_first else query + item for item in items]
    labelled = [[*prompt, label] for prompt in prompts for label in labels]
    outputs = await prompt_outputs(client, call, labelled, scoring_params(0), field="items")
    rows = []
    for place in range(len(items)):
        found = [_last_logprob(output) for output in outputs[place * len(labels) : (place + 1) * len(labels)]]
        rows.append(_shares(found) if body.apply_softmax else [math.exp(one) for one in found])
    usage = _usage(sum(map(len, prompts)))
    return {"object": "scoring", "model": shown_name(client, body.model), "scores": rows, "usage": usage}


def _shares(logprobs: list[float]) -> list[float]:
    """Probabilities among these alone; the same for all where none of them has any."""
    largest = max(logprobs)
    if largest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(one - largest) for one in logprobs]
    return [one / math.fsum(weights) for one in weights]


def _last_logprob(output: RequestOutput) -> float:
    assert output.prompt_logprobs is not None
    entry = output.prompt_logprobs[-1]
    assert entry is not None, "a label stands behind a token at least"
    return entry[output.prompt_token_ids[-1]].logprob


async def _likeness(call: Call, client: EngineClient) -> dict[str, Any]:
    """The cosine of the texts' vectors: of each pair, or of one text with each of a list."""
    body: ScoreBody = call.body
    given = next((pair for pair in PAIRS if all(getattr(body, name) is not None for name in pair)), None)
    if given is None:
        names = "; ".join(" and ".join(pair) for pair in PAIRS)
        raise bad_request(f"give query, items and label_token_ids, or two of these: {names}", None, "missing_field")
    left, right = ([text] if isinstance(text := getattr(body, name), str) else list(text) for name in given)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        text = f"{given[0]} has {len(left)} texts, {given[1]} has {len(right)}; give one, or as many"
        raise bad_request(text, given[0], "invalid_value")
    prompts = await client.encode_prompts([*left, *right], field=given[0])
    outputs = await prompt_outputs(client, call, prompts, params_for("last"), field=given[0])
    vectors = [vector_of(output) for output in outputs]
    pairs = zip(vectors[: len(left)], vectors[len(left) :], strict=True)
    data = [
        {"index": place, "object": "score", "score": math.fsum(a * b for a, b in zip(one, other, strict=True))}
        for place, (one, other) in enumerate(pairs)
    ]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return {**head, "model": shown_name(client, body.model), "data": data, "usage": _usage(sum(map(len, prompts)))}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
