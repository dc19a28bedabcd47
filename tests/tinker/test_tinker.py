"""The Tinker API over HTTP: clients train as a plain loop of torch does, and sample from what they have trained."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading

import httpx
import numpy as np
import pytest
import torch
from coordinator_case import coordinator
from server_case import running, tokenizer

from megatron_infer import RolloutSession, attach_lora
from megatron_infer.errors import ConfigError
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.http_server import HttpServer
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tinker import messages, service, training
from megatron_infer.server.tinker.routes import PROTOBUF, TinkerRoutes
from megatron_infer.server.tinker.serve import served_engine
from megatron_infer.server.tinker.service import TinkerService
from megatron_infer.server.tinker.training import Datum, LiveModel, LiveTrainer, TrainingClient
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
TOKENS = [[5, 9, 2, 7, 30], [8, 8, 1]]
LOSSES = {
    "cross_entropy": lambda x, g: -(x * g["weights"]).sum(),
    "importance_sampling": lambda x, g: -((x - g["logprobs"]).exp() * g["advantages"]).sum(),
    "ppo": lambda x, g: (
        -torch.minimum(
            (x - g["logprobs"]).exp() * g["advantages"], (x - g["logprobs"]).exp().clamp(0.8, 1.2) * g["advantages"]
        ).sum()
    ),
    "cispo": lambda x, g: -((x - g["logprobs"]).exp().clamp(0.8, 1.2).detach() * x * g["advantages"]).sum(),
    "gspo": lambda x, g: gspo(x, g),
    "dro": lambda x, g: -(x * g["advantages"] - 0.025 * (x - g["logprobs"]) ** 2).sum(),
}
SETTINGS = {"gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}


def gspo(x, given):
    ratio = (x - given["logprobs"])[given["sequence_ratio_mask"] > 0].mean().exp().detach() * (x - x.detach()).exp()
    return -torch.minimum(ratio * given["advantages"], ratio.clamp(0.9, 1.1) * given["advantages"]).sum()


def numbers(tokens, seed):
    drawn = np.random.default_rng(seed).normal(size=(3, len(tokens) - 1)).astype(np.float32)
    mask = {"sequence_ratio_mask": (np.arange(len(tokens) - 1) > 0).astype(np.float32)}
    return {"weights": drawn[0], "advantages": drawn[1], "logprobs": drawn[2] * 0.3 - 4.5} | mask


def model():
    return tiny_gpt(seed=3)


def output_of(content):
    """(the loss, log probabilities of each sequence's targets) of a ForwardBackwardOutput."""
    made = messages.message("ForwardBackwardOutput")
    made.ParseFromString(content)
    field = made.loss_fn_outputs[0].fields["logprobs"]
    places = np.frombuffer(field.offsets, "<i8") // 4
    values = np.frombuffer(field.data, "<f4")
    return made.metrics["loss:sum"], [values[a:b] for a, b in zip(places, places[1:], strict=False)]


def message_of_batch(model_id, seq_id, loss, tokens=TOKENS, *, given=None, forward_only=False, **config):
    sent = messages.message("ForwardBackwardRequest")
    sent.model_id, sent.seq_id, sent.loss_fn, sent.forward_only = model_id, seq_id, loss, forward_only
    for place, ids in enumerate(tokens):
        datum = sent.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(ids[:-1], "<i4").tobytes()
        values = {"target_tokens": np.asarray(ids[1:], "<i8"), **(given or numbers(ids, place))}
        for name, array in values.items():
            field = datum.loss_fn_inputs[name]
            field.dense, field.dtype = array.tobytes(), 2 if array.dtype.kind == "i" else 1
            field.shape.extend(array.shape)
    for name, value in config.items():
        sent.loss_fn_config[name] = value
    return sent.SerializeToString()


class Held:
    """A function of `owner` whose calls wait until `go_on` is set. begun: one is there."""

    def __init__(self, patch, owner, name):
        self.begun = threading.Event()
        self.go_on = threading.Event()
        whole = getattr(owner, name)

        def waiting(*args, **options):
            self.begun.set()
            assert self.go_on.wait(60)
            return whole(*args, **options)

        patch.setattr(owner, name, waiting)


class Api:
    """The calls of a client, as the SDK sends them."""

    def __init__(self, http):
        self.http, self.session = http, http.post("/api/v1/create_session", json={}).json()["session_id"]

    def call(self, route, /, **body):
        reply = self.http.post(f"/api/v1/{route}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def result(self, reply):
        reply = self.http.post("/api/v1/retrieve_future", json={"request_id": reply["request_id"]})
        assert reply.status_code == 200, reply.text
        return reply.content if reply.headers["content-type"] == PROTOBUF else reply.json()

    def create(self, number=0, rank=4, seed=7):
        lora = {"rank": rank, "seed": seed}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": lora}
        return self.result(self.call("create_model", **body))

    def train(self, number=0, rank=4, seed=7):
        made = self.create(number, rank, seed)
        assert "model_id" in made, made
        return made["model_id"]

    def send_batch(self, *args, **options):
        return self.send(message_of_batch(*args, **options))

    def send(self, content):
        return self.http.post("/api/v1/forward_backward", content=content, headers={"content-type": PROTOBUF})

    def batch(self, *args, **options):
        """(the loss, log probabilities of each sequence's targets)."""
        reply = self.send_batch(*args, **options)
        assert reply.status_code == 200, reply.text
        return output_of(self.result(reply.json()))

    def step(self, model_id, seq_id, **adam):
        return self.call("optim_step", model_id=model_id, seq_id=seq_id, adam_params={**ADAM, **adam})

    def sampler(self, model_id, seq_id, path=None):
        body = {"path": path} if path else {"sampling_session_seq_id": seq_id}
        return self.result(self.call("save_weights_for_sampler", model_id=model_id, seq_id=seq_id, **body))

    def send_sample(self, prompt, **body):
        chunks = [{"type": "encoded_text", "tokens": prompt}]
        return self.call(
            "asample", **{"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 6, "seed": 1}, **body}
        )

    def sample(self, prompt, **body):
        return self.drawn(self.send_sample(prompt, **body))

    def drawn(self, reply):
        """([(tokens, log probabilities) of each sample], log probabilities of the prompt)."""
        made = messages.message("SampleResponse")
        made.ParseFromString(self.result(reply))
        return [
            (np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4")) for one in made.sequences
        ], np.frombuffer(made.prompt_logprobs, "<f4")


def live_session(live=None, *, full=False, **options):
    live = model() if live is None else live
    adapter = None if full else attach_lora(live, rank=8, alpha=32, trains_only=True)
    options = {"buffer_size_gb": 0.01, "max_requests": 8, **options}
    if not full:
        options["lora"] = {"max_loras": 4, "max_rank": 8}
    return RolloutSession(live, options, meter=None, model_name="tiny"), adapter


@contextlib.contextmanager
def serving(state_dir, *, full=False, options=None, **settings):
    live = LiveModel(*live_session(full=full, **options or {}))
    with served(LiveTrainer(live), state_dir, **settings) as case:
        yield case


@contextlib.contextmanager
def served(
    trainer, state_dir, *, max_models=64, durable=False, tenants=(), on_coordinator=lambda address: None, **settings
):
    config = ServerConfig(port=0, log_requests=False, **settings)
    with contextlib.ExitStack() as stack, coordinator(timeout_s=20.0) as one:
        on_coordinator(one.address)
        how = {"model_name": "tiny", "max_models": max_models, "durable": durable, "num_tenants": len(tenants) or 1}
        made = {name: TinkerService(trainer, state_dir=state_dir / name, **how) for name in tenants or ("",)}
        services = {name: stack.enter_context(contextlib.closing(held)) for name, held in made.items()}
        routes = TinkerRoutes(services, dict(tenants))
        server = HttpServer(config, coordinator=one.address, tokenizer=tokenizer(), model="tiny", modules=(routes,))
        with (
            served_engine(trainer, one.address, on_failed=server.shut_down),
            running(server, config) as case,
            httpx.Client(base_url=case.url, timeout=60) as http,
        ):
            for one in services.values():
                trainer.submit(one.load).result(60)
            case.http, case.trainer, case.services, case.service = http, trainer, services, services.get("")
            yield case


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("state")) as one:
        yield one


@pytest.fixture
def api(case):
    return Api(case.http)


def check_parameters(client, wanted):
    """AdamW's step for a gradient near zero, whose sign is a matter of rounding, is as long as for a large one."""
    found, wanted = (torch.cat([one.detach().flatten() for one in of]) for of in (client.parameters, wanted))
    assert torch.isclose(found, wanted, atol=2e-5, rtol=1e-4).float().mean() > 0.998
    torch.testing.assert_close(found, wanted, atol=2 * ADAM["learning_rate"], rtol=0)


def plain_loop(name, steps=2, *, full=False):
    """(losses, log probabilities, parameters) of AdamW steps on the same adapter, or on all weights, by a session of
    one's own."""
    live = model()
    adapter = live if full else attach_lora(live, rank=4, alpha=32, seed=7)
    session = RolloutSession(live, {"buffer_size_gb": 0.01, "max_requests": 4}, meter=None)
    how = {"lr": ADAM["learning_rate"], "betas": (0.9, 0.95), "eps": ADAM["eps"], "weight_decay": ADAM["weight_decay"]}
    optimizer = torch.optim.AdamW(list(adapter.parameters()), **how)
    losses, found = [], []
    for _ in range(steps):
        scores = session.score(TOKENS, grad=True)
        given = [
            {key: torch.from_numpy(value) for key, value in numbers(ids, i).items()} for i, ids in enumerate(TOKENS)
        ]
        loss = sum(LOSSES[name](x, one) for x, one in zip(scores, given, strict=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        found.append([x.detach().numpy() for x in scores])
    return losses, found, list(adapter.parameters())


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_trains_as_a_plain_loop_does(case, api, name):
    losses, found, parameters = plain_loop(name)
    id = api.train()
    for place in range(2):
        loss, scores = api.batch(id, 2 * place + 1, name, **SETTINGS.get(name, {}))
        assert loss == pytest.approx(losses[place], rel=1e-4, abs=1e-5)
        for got, want in zip(scores, found[place], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        metrics = api.result(api.step(id, 2 * place + 2))["metrics"]
        assert metrics["version"] == place + 1 and metrics["grad_norm"] > 0
    check_parameters(case.service.model(id).client, parameters)


def test_clients_train_in_turns_as_alone_and_gradients_of_several_calls_add_up(case, api):
    one, other = api.train(0), api.train(1, rank=8, seed=1)
    for place, tokens in enumerate(TOKENS):  # a batch in two calls, with another client's between
        api.batch(one, place + 1, "cross_entropy", [tokens], given=numbers(tokens, place))
        api.batch(other, place + 1, "importance_sampling")
    api.result(api.step(other, 3))
    api.result(api.step(one, 3))
    _, _, parameters = plain_loop("cross_entropy", steps=1)
    check_parameters(case.service.model(one).client, parameters)


@pytest.mark.parametrize("place", ["adding", "checking"])
def test_gradients_of_a_call_that_fails_do_not_count(case, api, monkeypatch, place):
    id, fails, to_float, is_finite = api.train(), [], torch.Tensor.float, training._is_finite

    def failing(tensor):
        if fails:
            raise torch.OutOfMemoryError(fails.pop())
        return is_finite(tensor)

    def failing_float(tensor):
        if fails and place == "adding" and tensor is case.trainer.local.parameters()[-1].grad:
            raise torch.OutOfMemoryError(fails.pop())
        return to_float(tensor)

    sent = [{"tokens": [tokens], "given": numbers(tokens, at)} for at, tokens in enumerate(TOKENS)]
    monkeypatch.setattr(torch.Tensor, "float", failing_float)
    api.batch(id, 1, "cross_entropy", **sent[0])
    if place == "checking":
        monkeypatch.setattr(training, "_is_finite", failing)
    fails.append("no memory")
    failed = api.result(api.send_batch(id, 2, "cross_entropy", **sent[1]).json())
    assert failed["category"] == "server" and not fails
    api.batch(id, 0, "cross_entropy", **sent[1])
    other = api.train(1)
    for one in sent:
        api.batch(other, 0, "cross_entropy", **one)
    norms = [api.result(api.step(client, 0))["metrics"]["grad_norm"] for client in (id, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_client_whose_step_failed_half_way_is_refused_until_it_is_loaded(case, api, monkeypatch):
    id, take = api.train(), TrainingClient._take_values
    api.batch(id, 1, "cross_entropy")
    path = api.result(api.call("save_weights", model_id=id, seq_id=2, path="before"))["path"]

    def fail(client):
        monkeypatch.setattr(TrainingClient, "_take_values", take)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TrainingClient, "_take_values", fail)
    assert api.result(api.step(id, 3))["category"] == "server"
    for refused in (api.result(api.send_batch(id, 4, "cross_entropy").json()), api.sampler(id, 5)):
        assert "half-way" in refused["error"] and refused["category"] == "user"
    api.result(api.call("load_weights", model_id=id, seq_id=6, path=path, optimizer=True))
    api.batch(id, 7, "cross_entropy")
    assert api.result(api.step(id, 8))["metrics"]["version"] == 1
    check_parameters(case.service.model(id).client, plain_loop("cross_entropy", steps=1)[2])


def test_a_client_trains_after_one_of_another_rank_on_a_model_with_experts():
    data = [Datum(ids[:-1], ids[1:], {"weights": np.ones(len(ids) - 1, "<f4")}) for ids in TOKENS]
    norms = []
    for before in ([], [4]):
        live = LiveModel(*live_session(tiny_gpt(seed=3, **EXPERTS)))
        for rank in [*before, 8]:
            client = live.create(f"rank {rank}", rank=rank, seed=1)
            client.forward_backward(data, "cross_entropy", {}, backward=True)
        client.take_batch()
        norms.append(client.optim_step(**ADAM)["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_targets_of_a_prompt_may_be_anything_where_nothing_counts(case, api):
    masked = {
        name: np.where(np.arange(4) < 2, 0, values).astype("<f4") for name, values in numbers(TOKENS[0], 0).items()
    }
    with_targets = {**masked, "target_tokens": np.asarray([0, 0, *TOKENS[0][3:]])}
    found = []
    for place, given in enumerate((masked, with_targets)):
        id = api.train(place)
        found.append(api.batch(id, 1, "importance_sampling", TOKENS[:1], given=given))
        api.result(api.step(id, 2))
        found[-1] += ([one.detach().clone() for one in case.service.model(id).client.parameters],)
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(one, other)


def test_samples_are_of_the_adapter_that_was_saved_and_score_as_its_forward(api):
    id = api.train()
    before = api.sampler(id, 1)["sampling_session_id"]
    api.batch(id, 2, "cross_entropy", given=None)
    api.step(id, 3, learning_rate=0.3)
    after = api.sampler(id, 4)["sampling_session_id"]
    base = api.call("create_sampling_session", session_id=api.session, sampling_session_seq_id=0, base_model="tiny")
    drawn = {}
    for name, sampler in {"base": base["sampling_session_id"], "before": before, "after": after}.items():
        (first, second), prompt = api.sample(
            [5, 9, 2], sampling_session_id=sampler, num_samples=2, prompt_logprobs=True
        )
        drawn[name] = first, second, prompt
        assert math.isnan(prompt[0]) and len(prompt) == 3 and len(first[0]) == 6
    assert drawn["base"][0][0] == drawn["before"][0][0], "a new adapter adds nothing"
    assert drawn["base"][0][0] != drawn["after"][0][0]
    for place, (tokens, logprobs) in enumerate(drawn["after"][:2]):
        weights = {"weights": np.ones(8, np.float32)}
        _, (scores,) = api.batch(id, 5 + place, "cross_entropy", [[5, 9, 2, *tokens]], given=weights, forward_only=True)
        np.testing.assert_allclose(scores[2:], logprobs, atol=1e-4)
        np.testing.assert_allclose(scores[:2], drawn["after"][2][1:], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_samples_of_clients_in_one_batch_have_the_bits_of_forward(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(sys.modules[__name__], "model", lambda: tiny_gpt(seed=3, params_dtype=dtype))
    with serving(tmp_path, options={"batch_invariant": True, "enable_prefix_caching": True}) as case:
        api, samplers = Api(case.http), {}
        for place in range(3):
            id = api.train(place, rank=2 + 3 * place, seed=place)
            api.batch(id, 1, "importance_sampling")
            api.step(id, 2, learning_rate=0.3)
            path = "named" if place == 1 else None
            api.batch(id, 3, "ppo")
            api.step(id, 4, learning_rate=0.1)
            made = api.sampler(id, 5, path=path)
            samplers[id] = (
                {"model_path": made["path"]} if path else {"sampling_session_id": made["sampling_session_id"]}
            )
        prompt = [5, 9, 2, 40, 41, 3]
        how = {"num_samples": 2, "prompt_logprobs": True}
        sent = {id: api.send_sample(prompt, **chosen, **how) for id, chosen in samplers.items()}
        seen = set()
        for id, reply in sent.items():
            samples, of_prompt = api.drawn(reply)
            for place, (tokens, logprobs) in enumerate(samples):
                whole = [*prompt, *tokens]
                weights = {"weights": np.ones(len(whole) - 1, np.float32)}
                (scores,) = api.batch(id, 6 + place, "cross_entropy", [whole], given=weights, forward_only=True)[1]
                np.testing.assert_array_equal(scores, [*of_prompt[1:], *logprobs])
                once = {"sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}  # compute_logprobs of the SDK
                np.testing.assert_array_equal(api.sample(whole, **samplers[id], **once)[1][1:], scores)
                seen.add(tuple(scores.tolist()))
        assert len(seen) == 6, "the adapters differ"


def test_a_call_that_is_sent_again_computes_once_and_numbers_keep_the_order(api):
    id = api.train(5)
    assert api.train(5) == id
    step = api.step(id, 2)  # before the batch with the lower number
    assert api.step(id, 2) == step
    batches = [api.send_batch(id, 1, "cross_entropy").json() for _ in range(3)]
    assert len({one["request_id"] for one in batches}) == 1
    assert api.result(step)["metrics"]["version"] == 1
    assert api.result(api.step(id, 3)) == {
        "error": "optim_step before any forward_backward: there are no gradients", "category": "user"
    }  # fmt: skip


def test_what_was_saved_outlives_the_server(tmp_path):
    with serving(tmp_path) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy")
        api.step(id, 2)
        path = api.result(api.call("save_weights", model_id=id, seq_id=3, path="one"))["path"]
        assert "already" in api.result(api.call("save_weights", model_id=id, seq_id=4, path="one"))["error"]
        uri = api.sampler(id, 5, path="sampler")["path"]
        drawn = api.sample([5, 9, 2], model_path=uri)
        api.batch(id, 6, "cross_entropy")
        want = api.result(api.step(id, 7))["metrics"]
        _, scores = api.batch(id, 8, "cross_entropy", forward_only=True)
    with serving(tmp_path) as case:
        api = Api(case.http)
        assert api.call("weights_info", tinker_path=path)["lora_rank"] == 4
        id = api.train(seed=1)
        api.result(api.call("load_weights", model_id=id, seq_id=1, path=path, optimizer=True))
        api.batch(id, 2, "cross_entropy")
        assert api.result(api.step(id, 3))["metrics"] == want, "the optimizer goes on"
        np.testing.assert_array_equal(api.batch(id, 4, "cross_entropy", forward_only=True)[1][0], scores[0])
        again = api.sample([5, 9, 2], model_path=uri)
        assert again[0][0][0] == drawn[0][0][0]
        np.testing.assert_allclose(again[0][0][1], drawn[0][0][1], atol=1e-6)


@pytest.mark.long
def test_clients_of_a_durable_server_go_on_with_the_next_one(tmp_path):
    _, found, parameters = plain_loop("cross_entropy")
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        session, id = api.session, api.train()
        api.batch(id, 1, "cross_entropy")
        first = api.result(api.step(id, 2))
        api.batch(id, 3, "cross_entropy")
        gone = api.sampler(id, 4)["sampling_session_id"]
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        api.session = session
        assert api.call("session_heartbeat", session_id=session) and api.train() == id
        assert api.result(api.step(id, 2)) == first, "the reply that may not have arrived"
        assert "computed before" in api.result(api.send_batch(id, 1, "cross_entropy").json())["error"]
        assert "[3] were lost" in api.result(api.step(id, 5))["error"]
        assert case.http.get(f"/api/v1/samplers/{gone}").status_code == 404
        _, scores = api.batch(id, 6, "cross_entropy")
        for got, want in zip(scores, found[1], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        assert api.result(api.step(id, 7))["metrics"]["version"] == 2
        check_parameters(case.service.model(id).client, parameters)
        api.batch(id, 8, "cross_entropy")
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        api.batch(id, 8, "cross_entropy")  # again, as its gradients are gone
        assert api.result(api.step(id, 9))["metrics"]["version"] == 3
    (tmp_path / id / "client").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"client: .*damaged"), serving(tmp_path, durable=True):
        pass


def test_what_a_server_holds_is_bounded(tmp_path, monkeypatch):
    for name, value in {"MAX_FUTURES": 4, "MAX_SESSIONS": 2, "MAX_SAMPLERS": 2}.items():
        monkeypatch.setattr(service, name, value)
    with serving(tmp_path, max_models=1) as case:
        apis = [Api(case.http) for _ in range(3)]
        gone = case.http.post("/api/v1/session_heartbeat", json={"session_id": apis[0].session})
        assert gone.status_code == 410
        first = apis[1].train()
        case.service._sessions[apis[1].session] -= 2 * service.SILENT_S
        second = apis[2].train()  # room is made by the session that was silent
        assert "no model" in case.http.post("/api/v1/get_info", json={"model_id": first}).text
        base = {"session_id": apis[2].session, "base_model": "tiny"}
        samplers = [apis[2].call("create_sampling_session", sampling_session_seq_id=i, **base) for i in range(3)]
        status = [case.http.get(f"/api/v1/samplers/{one['sampling_session_id']}").status_code for one in samplers]
        assert status == [404, 200, 200]
        chosen = {"sampling_session_id": samplers[-1]["sampling_session_id"]}
        for _ in range(8):
            apis[2].sample([5, 9], **chosen)
        assert len(case.service._futures) <= 4
        later = [Api(case.http) for _ in range(3)]  # room is made by sessions without clients
        assert apis[2].call("get_info", model_id=second)["model_id"] == second
        assert case.http.post("/api/v1/session_heartbeat", json={"session_id": later[0].session}).status_code == 410
        monkeypatch.setattr(service, "MAX_SESSIONS", 1)
        case.service.end_session(later[2].session)
        assert case.http.post("/api/v1/create_session", json={}).status_code == 429


def test_wrong_calls_are_named_and_hurt_nobody(case, api):
    id = api.train()

    def why(reply, status=400):
        assert reply.status_code == status, reply.text
        return reply.json()["error"]["message"]

    assert "ForwardBackwardRequest" in why(api.send(b"\xff\xff\xff"))
    assert "cross_entropy" in why(api.send_batch(id, 0, "crossentropy"))
    assert "stable_reinforce is not supported: the hosted" in why(api.send_batch(id, 0, "stable_reinforce"))
    assert "forward_backward_custom" in why(api.send_batch(id, 0, "custom"))
    assert "clip_low" in why(api.send_batch(id, 0, "ppo", clip_low=0.1))
    assert "clip_high_threshold is missing" in why(api.send_batch(id, 0, "gspo", clip_low_threshold=0.1))
    assert "weights is missing" in why(api.send_batch(id, 0, "cross_entropy", given={"advantages": np.ones(4, "<f4")}))
    assert "[3], the targets are [4]" in why(
        api.send_batch(id, 0, "cross_entropy", TOKENS[:1], given={"weights": np.ones(3, "<f4")})
    )
    other = {"target_tokens": np.asarray([1, 2, 3, 4]), "weights": np.ones(4, "<f4")}
    assert "follow" in why(api.send_batch(id, 0, "cross_entropy", TOKENS[:1], given=other))
    assert "not within 0" in why(api.send_batch(id, 0, "cross_entropy", [[1, 10**6]]))
    assert "sequences" in why(api.send_batch(id, 0, "cross_entropy", []))
    assert "no model" in why(api.send_batch("nobody", 0, "cross_entropy"), 404)
    body = {"session_id": api.session, "model_seq_id": 9, "base_model": "another", "lora_config": {"rank": 4}}
    assert "'tiny'" in why(case.http.post("/api/v1/create_model", json=body))
    reply = case.http.post("/api/v1/create_model", json=body | {"base_model": "tiny", "lora_config": {"rank": 64}})
    assert "1 to 8" in api.result(reply.json())["error"]
    assert "any more" in why(case.http.post("/api/v1/retrieve_future", json={"request_id": "x"}), 410)
    assert "any more" in why(case.http.post("/api/v1/session_heartbeat", json={"session_id": "x"}), 410)
    for path in ("tinker://a/weights/../../x", "/etc/passwd", "tinker://../weights/x", "tinker://a/b/weights/c"):
        load = api.call("load_weights", model_id=id, path=path)
        assert "checkpoint" in api.result(load)["error"]
    assert "path" in why(case.http.post("/api/v1/save_weights", json={"model_id": id, "path": "../../x"}))
    assert (
        "not finite"
        in api.result(
            api.send_batch(id, 0, "cross_entropy", TOKENS[:1], given={"weights": np.full(4, np.nan, "<f4")}).json()
        )["error"]
    )
    loss, _ = api.batch(id, 1, "cross_entropy")
    assert math.isfinite(loss) and api.result(api.step(id, 2))["metrics"]["version"] == 1


def test_what_is_refused_or_given_up_keeps_its_place_and_holds_nobody(api):
    id = api.train()
    refused = api.send_batch(id, 1, "crossentropy").json()
    missing = api.call("load_weights", model_id=id, seq_id=2, path="tinker://a/weights/b")
    unnamed = api.call("save_weights", model_id=id, seq_id=3, path="../x")
    waiting = api.send_batch(id, 5, "cross_entropy").json()
    for _ in range(2):
        api.call("cancel_future", request_id=waiting["request_id"])
    step = api.step(id, 6)
    wrong = [api.result(one)["error"] for one in (refused, missing, unnamed)]
    assert [part in text for part, text in zip(("cross_entropy", "checkpoint", "path"), wrong, strict=True)] == [
        True
    ] * 3
    api.batch(id, 4, "cross_entropy")
    assert api.result(step)["metrics"]["version"] == 1, "after the call that came last"
    api.batch(id, 7, "cross_entropy")
    wrong = api.call("optim_step", model_id=id, seq_id=8, adam_params={**ADAM, "eps": 0})
    assert "eps" in api.result(wrong)["error"]
    path = api.result(api.call("save_weights", model_id=id, seq_id=9, path="one"))["path"]
    assert api.result(api.call("load_weights", model_id=id, seq_id=10, path=path))["path"] == path
    assert "no gradients" in api.result(api.step(id, 11))["error"], "those of before are gone"


def test_a_client_that_is_given_up_while_it_is_made_leaves_nothing(api, case, monkeypatch):
    known = set(case.trainer.local.clients)
    with monkeypatch.context() as patch:
        held = Held(patch, LiveTrainer, "create")
        body = {"base_model": "tiny", "lora_config": {"rank": 4}}
        sent = api.call("create_model", session_id=api.session, model_seq_id=0, **body)
        assert held.begun.wait(60)
        api.call("cancel_future", request_id=sent["request_id"])
        held.go_on.set()
    given_up = case.http.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]})
    assert given_up.status_code == 410
    id = api.train(number=1)
    assert set(case.trainer.local.clients) == known | {id}


def test_a_call_that_is_to_be_sent_later_has_not_had_its_turn(api, monkeypatch):
    def loading(_):
        raise unavailable("the model is loading", "loading")

    id = api.train()
    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "limits", property(loading))
        assert api.send_batch(id, 1, "cross_entropy").status_code == 503
    api.batch(id, 1, "cross_entropy")
    assert api.result(api.step(id, 2))["metrics"]["version"] == 1
    step = api.step(id, 4)
    with monkeypatch.context() as patch:
        patch.setattr(service, "MAX_FUTURES", 1)
        assert api.send_batch(id, 3, "cross_entropy").status_code == 429
    api.batch(id, 3, "cross_entropy")
    assert api.result(step)["metrics"]["version"] == 2


def test_named_samplers_are_loaded_when_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "MAX_ADAPTERS", 1)
    with serving(tmp_path) as case:
        api, drawn, paths = Api(case.http), [], []
        id = api.train()
        for place in range(3):
            paths.append(api.sampler(id, 3 * place + 1, path=f"s{place}")["path"])
            drawn.append(api.sample([5, 9, 2], model_path=paths[-1])[0])
            api.batch(id, 3 * place + 2, "cross_entropy")
            api.step(id, 3 * place + 3, learning_rate=0.3)
        for path, before in zip(paths, drawn, strict=True):
            again = api.sample([5, 9, 2], model_path=path)[0]
            assert again[0][0] == before[0][0]
            np.testing.assert_allclose(again[0][1], before[0][1], atol=1e-6)
        loaded = case.trainer.submit(case.trainer.session.engine.adapters).result(60)  # on the engine's own thread
        assert len(loaded) <= 2, "one that is used, and one to be unloaded next"


def test_each_client_that_exists_has_its_figures(case, api):
    def shown():
        (status, text) = (case.http.get("/v1/status").json()["clients"], case.http.get("/metrics").text)
        found = {}
        for name, client, value in re.findall(
            r'^megatron_infer_tinker_client_(\w+)\{client="([^"]+)"\} (\S+)$', text, re.MULTILINE
        ):
            found.setdefault(client, {})[name.removesuffix("_total")] = float(value)
        assert found.keys() == status.keys()
        return {client: status[client] | found[client] for client in found}

    one, other = api.train(0), api.train(1)
    labels = [f"{api.session[:8]}-{number}" for number in range(2)]
    assert api.session not in str(shown()) and set(labels) <= shown().keys()
    loss, scores = api.batch(one, 1, "cross_entropy")
    api.batch(one, 2, "cross_entropy", forward_only=True)
    api.result(api.step(one, 3))
    unnamed, path = api.sampler(one, 4)["sampling_session_id"], api.sampler(one, 5, path="here")["path"]
    drawn = [api.sample([5, 9], **chosen)[0] for chosen in ({"sampling_session_id": unnamed}, {"model_path": path})]
    api.step(one, 9)  # which waits for those before it
    figures, idle = (shown()[label] for label in labels)
    assert figures["steps"] == 1 and figures["queue"] == 1 and figures["loss"] == pytest.approx(loss)
    assert figures["trained_tokens"] == sum(len(one) for one in scores)
    assert figures["sampled_tokens"] == sum(len(tokens) for ((tokens, _),) in drawn)
    assert min(figures[name] for name in ("training_seconds", "sampling_seconds", "age_seconds")) > 0
    assert idle["steps"] == idle["sampled_tokens"] == idle["queue"] == 0 and idle["loss"] is None
    assert "loss" not in re.findall(rf'client_(\w+).client="{labels[1]}"', case.http.get("/metrics").text)
    api.result(api.call("unload_model", model_id=other))
    assert labels[0] in shown() and labels[1] not in shown()


def test_the_api_asks_for_the_servers_key(tmp_path):
    with serving(tmp_path, api_key="tml-secret") as case:
        assert case.http.post("/api/v1/create_session", json={}).status_code == 401
        headers = {"X-API-Key": "tml-secret"}
        assert case.http.post("/api/v1/create_session", json={}, headers=headers).status_code == 200


def test_a_training_client_whose_creation_was_given_up_is_made_when_the_call_is_sent_again(tmp_path, monkeypatch):
    held = Held(monkeypatch, LiveModel, "create")
    with serving(tmp_path) as case:
        api = Api(case.http)
        body = {"session_id": api.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        sent = api.call("create_model", **body)
        assert held.begun.wait(60)
        api.call("cancel_future", request_id=sent["request_id"])
        again = api.call("create_model", **body)
        monkeypatch.setattr(service, "FUTURE_S", 0.0)  # the next call drops the result that was given up
        api.call("create_model", **body | {"model_seq_id": 1})
        monkeypatch.setattr(service, "FUTURE_S", 600.0)
        assert api.call("create_model", **body) == again
        held.go_on.set()
        assert again != sent
        id = api.result(again)["model_id"]
        api.batch(id, 1, "cross_entropy")
        assert api.result(api.step(id, 2))["metrics"]["version"] == 1
