"""/v1/embeddings with the official client returns what the engine pools offline."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from server_case import client_of, post, serving, tiny_engine, tokenizer

from megatron_infer.outputs.embeddings import params_for, vector_of

TEXTS = ["Once upon a time", "there was", "a " * 60]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(max_requests=8, enable_chunked_prefill=True, max_tokens=48)


@pytest.fixture(scope="module")
def offline(engine):
    ids = [tokenizer().encode(text) for text in TEXTS]
    return {pooling: engine.generate(ids, params_for(pooling)) for pooling in ("last", "mean", "all")}


@pytest.fixture(scope="module")
def case(offline, engine):
    with serving(engine) as one:
        yield one


def test_texts_and_token_ids_give_the_engines_vectors(client, offline):
    for pooling in ("last", "mean"):
        wanted = [vector_of(output) for output in offline[pooling]]
        for given in (TEXTS, [tokenizer().encode(text) for text in TEXTS]):
            reply = client.embeddings.create(model="tiny", input=given, user="me", extra_body={"pooling": pooling})
            assert [one.index for one in reply.data] == [0, 1, 2]
            for one, vector in zip(reply.data, wanted, strict=True):
                np.testing.assert_allclose(one.embedding, vector, atol=1e-5)
                assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, TEXTS))
    for given in (TEXTS[0], tokenizer().encode(TEXTS[0])):
        (one,) = client.embeddings.create(model="tiny", input=given).data
        np.testing.assert_allclose(one.embedding, vector_of(offline["last"][0]), atol=1e-5)


def test_floats_and_base64_are_equal_and_dimensions_keeps_the_first_ones(client, case, offline):
    floats = client.embeddings.create(model="tiny", input="there was", encoding_format="float").data[0].embedding
    data = post(case, PATH, input="there was", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(data), "<f4"), np.asarray(floats, np.float32))
    cut = client.embeddings.create(model="tiny", input="there was", dimensions=8).data[0].embedding
    np.testing.assert_allclose(cut, vector_of(offline["last"][1], dimensions=8), atol=1e-5)
    raw = post(case, PATH, input="there was", normalize=False).json()["data"][0]["embedding"]
    np.testing.assert_allclose(raw, offline["last"][1].pooled, atol=1e-4)


def test_each_token_has_a_vector_with_pooling_all(case, offline):
    """Prompts of other lengths beside it, padding and chunks of 48 tokens change nothing."""
    wanted = [vector_of(output, normalize=False) for output in offline["all"]]
    assert [len(one) for one in wanted] == [len(text) for text in TEXTS]
    asked = {"input": TEXTS, "pooling": "all", "normalize": False}
    for one, vectors in zip(post(case, PATH, **asked).json()["data"], wanted, strict=True):
        np.testing.assert_allclose(one["embedding"], vectors, atol=1e-4)
    np.testing.assert_allclose(wanted[2][-1], offline["last"][2].pooled, atol=1e-4)
    np.testing.assert_allclose(np.mean(wanted[2], axis=0), offline["mean"][2].pooled, atol=1e-4)
    data = post(case, PATH, **asked, encoding_format="base64", dimensions=4).json()["data"][1]["embedding"]
    found = np.frombuffer(base64.b64decode(data), "<f4").reshape(len(TEXTS[1]), 4)
    np.testing.assert_allclose(found, np.array(wanted[1])[:, :4], atol=1e-4)
    unit = post(case, PATH, input=TEXTS[1], pooling="all").json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)


def test_a_server_that_does_not_pool_gives_each_token_its_vector_unless_asked(engine, offline):
    with (
        serving(engine, pool_embeddings=False) as one,
        client_of(one) as client,
    ):
        found = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float").data
        for each, output in zip(found, offline["all"], strict=True):
            np.testing.assert_allclose(each.embedding, vector_of(output), atol=1e-4)
        pooled = post(one, PATH, input=TEXTS, pooling="last").json()["data"]
        for each, output in zip(pooled, offline["last"], strict=True):
            np.testing.assert_allclose(each["embedding"], vector_of(output), atol=1e-4)


def test_vectors_beyond_the_largest_reply_are_refused(engine):
    with serving(engine, max_reply_bytes=200_000) as one:
        reply = post(one, PATH, input="a" * 200, pooling="all")
        assert reply.status_code == 400 and "max_reply_bytes" in reply.json()["error"]["message"]
        assert post(one, PATH, input="a" * 200).status_code == 200
