"""The routes of the Tinker API: POST /api/v1/..., JSON and protobuf as the official SDK sends and reads them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from starlette.responses import Response

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.protocol import Overloaded
from megatron_infer.engine.durable.file_format import read_manifest
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.endpoint import CALLER, Call, Handler, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation_request import check_values
from megatron_infer.server.http_errors import ApiError, api_error_of
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.request_body import INLINE_BYTES
from megatron_infer.server.routes import Routes, Tenants
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tinker import messages, requests
from megatron_infer.server.tinker.figures import Row, families_of
from megatron_infer.server.tinker.losses import loss_named, settings_of
from megatron_infer.server.tinker.requests import read
from megatron_infer.server.tinker.service import Model, Sampler, TinkerService, model_of
from megatron_infer.server.tinker.training import Datum, pieces

PREFIX = "/api/v1/"
PROTOBUF = "application/x-protobuf"
LATER = (429, 503)
"""Statuses of a refusal after which the call is sent again, with its number."""
MAX_DATA = 4096
"""Sequences of one forward_backward."""

_B = TypeVar("_B")
Work = Callable[[], Coroutine[Any, Any, Any]]
"""An operation whose body has been checked."""


class TinkerRoutes:
    """Registers the API in a server, as one of its modules."""

    _client: EngineClient

    def __init__(self, services: Mapping[str, TinkerService], keys: Mapping[str, str]) -> None:
        """services: by tenant; of "" alone, where there are no tenants. keys: of tenants."""
        self._services = services
        self._keys = keys

    @property
    def _service(self) -> TinkerService:
        """The caller's."""
        return self._services[CALLER.get() if self._keys else ""]

    def _rows(self) -> dict[str, Row]:
        """Figures of all training clients, by their labels."""
        return {
            f"{tenant}:{label}" if tenant else label: row
            for tenant, service in self._services.items()
            for label, row in service.rows().items()
        }

    def register(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
        self._client, routes.tenants = client, Tenants(PREFIX, self._keys)
        client.meter.sources.append(lambda: families_of(self._rows()))
        client.shown["clients"] = self._rows
        for path, (summary, handler) in {
            "client/config": ("Flags of the SDK", _giving({"pjwt_auth_enabled": False})),
            "client/dynamic_config": ("Flags of the SDK that may change", _giving({})),
            "telemetry": ("Events of the SDK; they are dropped", _giving({"status": "accepted"})),
            "create_session": ("Begin a session", self._create_session),
            "session_heartbeat": ("Keep a session", self._heartbeat),
            "sessions/{id}/finish": ("End a session", self._finish),
            "create_model": ("Make a training client", self._create_model),
            "unload_model": ("Forget a training client", self._ordered(_read_as(requests.OfModel, self._unload_model))),
            "get_info": ("Describe a training client", self._get_info),
            "forward_backward": ("Compute a loss, and its gradients", self._ordered(self._forward_backward)),
            "optim_step": ("Step a client's optimizer", self._ordered(_read_as(requests.OptimStep, self._optim_step))),
            "save_weights": (
                "Save a client's adapter and optimizer",
                self._ordered(_read_as(requests.SaveWeights, self._save_weights)),
            ),
            "load_weights": ("Load what was saved", self._load_weights),
            "weights_info": ("Describe what was saved", self._weights_info),
            "save_weights_for_sampler": (
                "Make a client's adapter one to sample from",
                self._ordered(_read_as(requests.SaveWeights, self._save_for_sampler)),
            ),
            "create_sampling_session": ("Make a sampler", self._create_sampler),
            "asample": ("Draw samples", self._sample),
            "retrieve_future": ("The result of a call", self._retrieve),
            "cancel_future": ("Give up a call", self._cancel),
        }.items():
            routes.add(
                "POST", PREFIX + path, _answering(handler), summary, statuses=(400, 404, 408, 410, 413, 415, 429, 503)
            )
        routes.add("GET", PREFIX + "get_server_capabilities", _answering(self._capabilities), "What the server has")
        routes.add(
            "GET", PREFIX + "samplers/{id}", _answering(self._get_sampler), "Describe a sampler", statuses=(404,)
        )
        routes.add("GET", PREFIX + "healthz", _answering(_giving({"status": "ok"})), "Whether the server answers")

    # ------------------------------------------------------------------ sessions

    async def _capabilities(self, _: Call) -> Any:
        shown = {"model_name": self._service.model_name, "trainable": True, "sampleable": True}
        return {"supported_models": [shown | {"max_context_length": self._client.limits.max_length}]}

    async def _create_session(self, call: Call) -> Any:
        read(call, dict)
        return {"type": "create_session", "session_id": self._service.new_session()}

    async def _heartbeat(self, call: Call) -> Any:
        self._service.check_session(read(call, requests.OfSession).session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, call: Call) -> Any:
        self._service.end_session(call.request.path_params["id"])
        return {}

    # ------------------------------------------------------------------ training

    async def _create_model(self, call: Call) -> Any:
        body, service = read(call, requests.CreateModel), self._service
        id = service.model_id(body.session_id, body.model_seq_id)
        service.check_base(body.base_model)
        asked, is_full = body.lora_config, service.trainer.local.adapter is None
        if asked is None and not is_full:
            raise RequestError("lora_config: this server trains adapters; --full is for all weights")
        if asked is not None and not (asked.train_mlp and asked.train_attn and (asked.train_unembed or not is_full)):
            what = "all weights train (--full)" if is_full else "an adapter has pairs on all linears"
            raise RequestError(f"lora_config: train_mlp, train_attn (and train_unembed with --full) are on: {what}")
        rank, seed = (asked.rank, asked.seed or 0) if asked is not None and not is_full else (0, 0)

        async def create() -> Any:
            model = await service.create_model(id, rank=rank, seed=seed)
            return {"type": "create_model", "model_id": model.id}

        return self._made(call, id, create)

    async def _unload_model(self, model: Model, _: requests.OfModel) -> Any:
        self._service.unload_model(model.id)
        return {"type": "unload_model", "model_id": model.id}

    async def _get_info(self, call: Call) -> Any:
        model, name = self._service.model(read(call, requests.OfModel).model_id), self._service.model_name
        data = {"arch": "megatron", "model_name": name, "tokenizer_id": name}
        shown = {"type": "get_info", "model_id": model.id, "model_data": data, "model_name": name}
        return shown | {"is_lora": model.client.rank > 0, "lora_rank": model.client.rank or None}

    async def _forward_backward(self, model: Model, sent: Any) -> Work:
        """sent: a ForwardBackwardRequest."""
        function = loss_named(sent.loss_fn)
        given = {name: float(value) for name, value in sent.loss_fn_config.items()}
        given |= {name: value.number for name, value in sent.loss_fn_config_v2.items()}
        if texts := sorted(name for name, value in sent.loss_fn_config_v2.items() if value.text):
            raise RequestError(f"loss_fn_config: {texts[0]} is a text, it must be a number")
        settings = settings_of(function, given)
        if not 0 < len(sent.data) <= MAX_DATA:
            raise RequestError(f"data: {len(sent.data)} sequences, there must be 1 to {MAX_DATA}")
        data = await _in_thread(self._data_of, sent, function.inputs)
        number, loss_fn, backward = sent.seq_id, sent.loss_fn, not sent.forward_only
        client, figures = model.client, model.figures

        async def compute() -> Any:
            total, scores = 0.0, list[torch.Tensor]()
            try:
                for piece in pieces(data):
                    if backward and 0 < number < model.settled:
                        raise RequestError(
                            f"seq_id: operation {number} comes after operation {model.settled}, which used or "
                            "dropped the gradients; send the batch with a new number"
                        )
                    work = partial(client.forward_backward, piece, loss_fn, settings, backward=backward)
                    loss, found = await self._service.run_for(model, work)
                    total, scores = total + loss, scores + found
                if backward:
                    await self._service.count_batch(model, number)
            except BaseException:
                if backward:
                    self._service.drop_batch(model)
                raise
            if backward:
                figures.loss = total
                figures.trained_tokens += sum(len(score) for score in scores)
            return _forward_backward_output(total, scores)

        return compute

    def _data_of(self, sent: Any, names: tuple[str, ...]) -> list[Datum]:
        limits, data = self._client.limits, list[Datum]()
        for datum in sent.data:
            if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
                raise RequestError("data: model_input has a chunk that is no text, which this model does not read")
            tokens = [id for chunk in datum.model_input for id in _ids(chunk.encoded_text.tokens)]
            try:
                tensors = {name: messages.tensor_of(datum.loss_fn_inputs[name]) for name in datum.loss_fn_inputs}
            except ValueError as error:
                raise RequestError(f"data: loss_fn_inputs: {error}") from None
            if missing := sorted({"target_tokens", *names} - tensors.keys()):
                raise RequestError(f"data: loss_fn_inputs: {missing[0]} is missing")
            targets = tensors["target_tokens"]
            if targets.ndim != 1 or targets.dtype.kind != "i":
                raise RequestError(f"data: target_tokens are {list(targets.shape)} {targets.dtype}, not ids [tokens]")
            inputs = {name: torch.from_numpy(tensors[name].astype(np.float32)) for name in names}
            one = Datum(tokens, targets.tolist(), inputs)
            if len(one.sequence) > limits.max_length:
                raise RequestError(f"data: {len(one.sequence)} tokens, the model takes {limits.max_length}")
            if not all(0 <= id < limits.vocab_size for id in one.sequence):
                raise RequestError(f"data: a token is not within 0 and {limits.vocab_size - 1}")
            data.append(one)
        return data

    async def _optim_step(self, model: Model, body: requests.OptimStep) -> Any:
        def work() -> Any:
            metrics = model.client.optim_step(**msgspec.structs.asdict(body.adam_params))
            return {"type": "optim_step", "metrics": metrics}

        service, seq_id = self._service, body.seq_id or 0
        try:
            if model.lost:
                await service.run(model.client.drop_gradients)
                raise RequestError(
                    f"optim_step: the gradients of operations {model.lost} were lost with an earlier server; those "
                    "since are dropped too, send all batches of the step again"
                )
            reply = await service.change(model, seq_id, work)
        except RequestError:  # the client has no gradients now
            service.settle(model, seq_id)
            raise
        model.figures.steps += 1
        return reply

    async def _save_weights(self, model: Model, body: requests.SaveWeights) -> Any:
        name = body.path or f"step{model.client.version}"
        path = self._service.state_dir / model.id / "weights" / name
        if path.exists() and not body.overwrite:
            raise RequestError(f"path: {name} is there already; give overwrite: true")
        await self._service.run_for(model, lambda: model.client.save(path))
        return {"type": "save_weights", "path": f"tinker://{model.id}/weights/{name}"}

    async def _load(self, model: Model, body: requests.LoadWeights) -> Any:
        path = self._service.path_of(body.path, "weights")

        def work() -> Any:
            model.client.load(path, optimizer=body.optimizer)
            return {"type": "load_weights", "path": body.path, "model_id": model.id}

        return await self._service.change(model, body.seq_id or 0, work)

    async def _load_weights(self, call: Call) -> Any:
        if read(call, requests.MayNameModel).model_id is not None:
            return await self._ordered(_read_as(requests.LoadWeights, self._load))(call)
        body, service = read(call, requests.LoadWeights), self._service
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("model_id, or session_id and model_seq_id, are missing")
        id = service.model_id(body.session_id, body.model_seq_id)
        if body.base_model is not None:
            service.check_base(body.base_model)

        async def create() -> Any:
            if (known := service.models.get(id)) is not None:
                if known.changed[1] == {"type": "load_weights", "path": body.path, "model_id": known.id}:
                    return known.changed[1]  # the call is sent again
                raise RequestError(
                    f"model_seq_id: there is a training client {body.model_seq_id} of this session; load into it with "
                    "its model_id, or take another number"
                )
            rank = (await asyncio.to_thread(read_manifest, service.path_of(body.path, "weights")))["rank"]
            model = await service.create_model(id, rank=rank, seed=None)
            try:
                return await self._load(model, body)
            except BaseException:
                service.unload_model(model.id)
                raise

        return self._made(call, id, create)

    async def _weights_info(self, call: Call) -> Any:
        path = self._service.path_of(read(call, requests.WeightsInfo).tinker_path, "weights")
        rank = (await asyncio.to_thread(read_manifest, path))["rank"]
        trained = {"train_unembed": not rank, "train_mlp": True, "train_attn": True}
        return {"base_model": self._service.model_name, "is_lora": rank > 0, "lora_rank": rank or None, **trained}

    # ------------------------------------------------------------------ sampling

    async def _save_for_sampler(self, model: Model, body: requests.SaveWeights) -> Any:
        service, uri = self._service, None
        if body.path:
            uri = f"tinker://{model.id}/sampler_weights/{body.path}"
            folder = service.state_dir / model.id / "sampler_weights" / body.path
            await service.run_for(model, lambda: model.client.save_for_sampler(folder))
        sampler = await service.publish(model, uri)
        shown = {"type": "save_weights_for_sampler", "path": uri, "sampling_session_id": sampler.id}
        return shown | {"version": model.client.version}

    async def _create_sampler(self, call: Call) -> Any:
        body, service = read(call, requests.CreateSamplingSession), self._service
        service.check_session(body.session_id)
        self._check_sampled(body.base_model, body.model_path)
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        return {
            "type": "create_sampling_session",
            "sampling_session_id": service.new_sampler(None, body.model_path, id=id).id,
        }

    async def _get_sampler(self, call: Call) -> Any:
        sampler = self._service.sampler(call.request.path_params["id"])
        return {"sampler_id": sampler.id, "base_model": self._service.model_name, "model_path": sampler.path}

    def _check_sampled(self, base: str | None, path: str | None) -> None:
        """Raises ApiError for a base model or a path that is not there."""
        if path is not None:
            self._service.path_of(path, "sampler_weights")
        elif base is None:
            raise RequestError("base_model or model_path is missing")
        else:
            self._service.check_base(base)

    async def _sample(self, call: Call) -> Any:
        body, service = read(call, requests.Sample), self._service
        if body.sampling_session_id is not None:
            sampler = service.sampler(body.sampling_session_id)
        else:
            self._check_sampled(body.base_model, body.model_path)
            sampler = Sampler("", None, body.model_path, model_of(body.model_path))
        for name in ("prompt_alt_tokens_k", "target_prompt_logprobs", "record_stability_info"):
            if getattr(body, name):
                raise RequestError(f"{name} is not supported; leave it out")
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise RequestError("prompt: a chunk is no text, which this model does not read")
        digest, number = _digest(call, call.body), body.seq_id

        def start() -> str:
            return service.future(draw(), on_dropped=lambda: sampler.futures.pop(number, None))

        if number in sampler.futures:  # whatever the weights are by now
            return _future_of_samples(service.once(sampler.futures, number, digest, start), body)
        client, prompt, values = self._client, [id for one in body.prompt.chunks for id in one.tokens], _values(body)
        check_values(values, SAMPLED_AS, client.settings)
        content = service.trainer.local.content
        params = SamplingParams(**values, adapter=await service.adapter_of(sampler))
        checked = client.checked([EngineRequest(prompt_ids=prompt, params=params)], call, field="prompt")

        async def draw() -> Any:
            began = time.monotonic()
            try:
                async with client.submit(checked) as inflight:
                    (output,) = await inflight.results()
            except Overloaded as error:
                raise _to_be_drawn_again(str(error)) from None
            num_tokens = sum(len(one.token_ids) for one in output.outputs)
            service.sampled(sampler, num_tokens=num_tokens, seconds=time.monotonic() - began)
            if service.trainer.local.content != content:
                raise RequestError("the weights have changed while the sample was drawn (--full); draw it again")
            return _sample_response(output, body)

        id = start() if number is None else service.once(sampler.futures, number, digest, start)
        return _future_of_samples(id, body)

    # ------------------------------------------------------------------ futures

    async def _retrieve(self, call: Call) -> Any:
        id = read(call, requests.Retrieve).request_id
        try:
            result = await self._service.result(id)
        except InferenceError as error:
            found = api_error_of(error)
            if found.status in (410, 503):  # the SDK asks again, and the server that comes next has the call sent again
                raise found from None
            category = "server" if found.status >= 500 else "user"
            return {"error": found.message, "category": category}
        if result is None:
            return Reply({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)
        if isinstance(result, dict):
            return result
        return Response(result.SerializeToString(), media_type=PROTOBUF)

    async def _cancel(self, call: Call) -> Any:
        self._service.cancel(read(call, requests.Retrieve).request_id)
        return {}

    def _ordered(self, prepare: Callable[[Model, Any], Awaitable[Work]]) -> Handler:
        """Handler of a route whose body has a model_id and a seq_id. prepare: validates the body -> the operation.

        A call that it refuses keeps its seq_id: later calls wait for it.
        """

        async def answer(call: Call) -> Any:
            placed = await _in_thread(_placed, call) if len(call.body) > INLINE_BYTES else _placed(call)
            try:
                work = await prepare(self._service.model(placed.model_id), placed.body)
            except InferenceError as error:
                refused = api_error_of(error)
                if not placed.seq_id or refused.status in LATER:
                    raise
                work = partial(_refuse, refused.with_traceback(None))  # whose frames would hold the body
            model = self._service.model(placed.model_id)  # it may have been unloaded meanwhile
            id = self._service.in_order(model, placed.seq_id, placed.digest, work, room=call.room)
            return {"request_id": id, "model_id": model.id}

        return answer

    def _made(self, call: Call, id: str, work: Work) -> Any:
        """The future of a call that makes a training client."""
        made = self._service.made

        def start() -> str:
            def forget() -> None:
                if id in made and made[id].future == future:  # else the call was cancelled, and sent again
                    del made[id]

            future = self._service.future(work(), on_dropped=forget)
            return future

        return {"request_id": self._service.once(made, id, _digest(call, call.body), start)}


class Placed(NamedTuple):
    """A call that has a place among the operations of a training client."""

    model_id: str
    seq_id: int
    digest: bytes
    body: Any
    """The ForwardBackwardRequest; of other routes the call itself."""


def _placed(call: Call) -> Placed:
    """Raises RequestError, and ApiError 415."""
    if call.route != PREFIX + "forward_backward":
        named = read(call, requests.OfModel)
        return Placed(named.model_id, named.seq_id or 0, _digest(call, call.body), call)
    if (kind := call.request.headers.get("content-type", "")) != PROTOBUF:
        raise ApiError(415, f"the body must come as Content-Type: {PROTOBUF}, got {kind[:60]!r}")
    sent = messages.read("ForwardBackwardRequest", call.body)
    # maps of a message that is sent again may come in another order
    return Placed(sent.model_id, sent.seq_id, _digest(call, sent.SerializeToString(deterministic=True)), sent)


def _digest(call: Call, body: bytes) -> bytes:
    """The same for a call that is sent again."""
    return hashlib.blake2b(call.route.encode() + body, digest_size=16).digest()


async def _in_thread(work: Callable[..., _B], *args: Any) -> _B:
    """work(*args) in a thread, to its end: the room of a body is given back once no thread reads the body."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise


async def _refuse(error: ApiError) -> Any:
    raise error


def _read_as(kind: type[_B], work: Callable[[Model, _B], Coroutine[Any, Any, Any]]) -> Any:
    """work: on a training client and a body -> the `prepare` of `_ordered`."""

    async def prepare(model: Model, call: Call) -> Work:
        return partial(work, model, read(call, kind))

    return prepare


def _to_be_drawn_again(why: str) -> ApiError:
    """The SDK sends a sample again, after a while, whose result is gone."""
    return ApiError(410, f"{why}; draw it again", code="draw_again")


def _giving(reply: Any) -> Handler:
    """Of a route whose reply is always the same."""

    async def answer(_: Call) -> Any:
        return reply

    return answer


def _answering(handler: Handler) -> Handler:
    async def answer(call: Call) -> Any:
        result = await handler(call)
        return result if isinstance(result, Response | Reply) else Reply(result)

    return answer


def _ids(content: bytes) -> list[int]:
    if len(content) % 4:
        raise RequestError(f"data: {len(content)} bytes of tokens are no whole number of int32")
    ids: list[int] = np.frombuffer(content, "<i4").tolist()
    return ids


def _future_of_samples(id: str, body: requests.Sample) -> Any:
    return {"request_id": id, "sample_sequence_ids": [f"{id}.{place}" for place in range(body.num_samples)]}


SAMPLED_AS = {"n": "num_samples", "logprobs": "topk_sample_logprobs", "prompt_logprobs": "topk_prompt_logprobs"}
"""Fields of SamplingParams that a body names otherwise."""


def _values(body: requests.Sample) -> dict[str, Any]:
    """Fields of SamplingParams."""
    how = body.sampling_params
    stops: dict[str, Any] = {}
    if isinstance(how.stop, list) and how.stop and isinstance(how.stop[0], int):
        stops = {"stop_token_ids": how.stop}
    elif how.stop:
        stops = {"stop": how.stop}
    wants_prompt = bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0
    return {
        "n": body.num_samples,
        "logprobs": body.topk_sample_logprobs,
        "prompt_logprobs": body.topk_prompt_logprobs if wants_prompt else None,
        "detokenize": "stop" in stops,
        **{name: getattr(how, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")},
        **stops,
    }


def _forward_backward_output(loss: float, scores: list[torch.Tensor]) -> Any:
    made = messages.message("ForwardBackwardOutput")
    made.loss_fn_output_type, made.metrics["loss:sum"] = "TensorRecord", loss
    record = made.loss_fn_outputs.add()
    record.num_datums = len(scores)
    field = record.fields["logprobs"]
    field.dtype = messages.FLOAT32
    field.offsets = np.cumsum([0, *(4 * len(score) for score in scores)]).astype("<i8").tobytes()
    field.data = messages.floats(torch.cat(scores).numpy())
    return made


def _sample_response(output: RequestOutput, body: requests.Sample) -> Any:
    made = messages.message("SampleResponse")
    for one in output.outputs:
        if one.finish_reason in ("abort", "error"):
            raise _to_be_drawn_again("the sample was aborted")
        sequence = made.sequences.add()
        sequence.stop_reason = 1 if one.finish_reason == "length" else 0
        sequence.tokens = np.asarray(one.token_ids, "<i4").tobytes()
        entries = one.logprobs or []
        found = [entry[id].logprob for entry, id in zip(entries, one.token_ids, strict=True)]
        sequence.logprobs = messages.floats(found)
        if body.topk_sample_logprobs:
            _fill_top(sequence.topk_sampled_logprobs, entries, body.topk_sample_logprobs)
    prompt = output.prompt_logprobs
    if prompt:
        pairs = zip(prompt, output.prompt_token_ids, strict=True)
        made.prompt_logprobs = messages.floats([np.nan if one is None else one[id].logprob for one, id in pairs])
        if body.topk_prompt_logprobs:
            _fill_top(made.topk_prompt_logprobs, [one or {} for one in prompt], body.topk_prompt_logprobs)
    made.prompt_cache_hit_tokens = output.num_cached_tokens or 0
    return made


def _fill_top(field: Any, entries: Any, k: int) -> None:
    """The k likeliest tokens of each place; -1 and NaN where there are none."""
    ids: Any = np.full((len(entries), k), -1, np.int32)
    values: Any = np.full((len(entries), k), np.nan, np.float32)
    for place, entry in enumerate(entries):
        likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)[:k]
        for column, (id, one) in enumerate(likeliest):
            ids[place, column], values[place, column] = id, one.logprob
    field.k, field.length = k, len(entries)
    field.token_ids, field.logprobs = ids.tobytes(), values.tobytes()
