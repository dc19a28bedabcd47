"""megatron-core's engine for its scripts: this package's engine on the model of a controller (`mcore.context`).

Names, parameters and results are megatron-core's, from 0.16 to 0.20.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from megatron.core.inference.engines import dynamic_engine as theirs
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine import engine as ours
from megatron_infer.errors import ConfigError, RequestError, WrongState
from megatron_infer.mcore.context import Named
from megatron_infer.mcore.listening import Listening
from megatron_infer.mcore.results import Codec, prompt_of, refuse_images, result_of
from megatron_infer.outputs.request_output import RequestOutput

WAITED_FOR = ("RUNNING", "PAUSED", "SUSPENDED", "RESUMED", "STOPPED")
States: Any = getattr(theirs, "EngineState", None) or Enum("EngineState", WAITED_FOR)
"""megatron-core's states of an engine; it has them from 0.17 on."""
ENDS = {
    "RUNNING": ("PAUSED", "SUSPENDED"),
    "PAUSED": ("RUNNING",),
    "SUSPENDED": ("RESUMED", "RUNNING"),
    "RESUMED": ("SUSPENDED",),
    "STOPPED": ("SUSPENDED", "RUNNING"),
}
"""State that is reached -> states that are no longer waited for with success. An engine that was suspended stays paused
until it runs."""


class _Entry(NamedTuple):
    """An unfinished request."""

    request: DynamicInferenceRequest
    future: asyncio.Future[Any]


class DynamicInferenceEngine(Named):
    """megatron-core's engine: `add_request` and `step_modern` by a script, or requests of a coordinator.

    Requests are added and steps are made on every rank of a model, as there. `inner` is this package's engine.
    """

    def __init__(self, controller: Any, context: Any, *args: Any, **keywords: Any) -> None:
        """args: enable_cuda_graph and random_seed of 0.16, keywords: these and its others."""
        keywords |= dict(zip(("enable_cuda_graph", "random_seed"), args, strict=False))
        self.controller = controller
        self.context = context
        self.codec = Codec(controller.tokenizer)
        model = controller.inference_wrapped_model.model
        config = context.engine_config({name: value for name, value in keywords.items() if value is not None})
        self.inner = context.engine = ours.DynamicInferenceEngine(model, config, tokenizer=self.codec)
        self.pg_collection = config.pg_collection or getattr(model, "pg_collection", None)
        self.request_counter = itertools.count()
        self.capture_stats: dict[str, Any] | None = None
        """What megatron-core measures while it captures graphs; here the start-up log has it."""
        self.local_metadata_ledger_enabled = False
        self.local_metadata_ledger: dict[str, Any] = {}
        """Epochs and evictions of finished requests, by their uid, which HTTP replies have as their id."""
        self.inference_coordinator_process = None
        """The coordinator runs in a thread of rank 0."""
        self.engine_loop_task: asyncio.Future[None] | None = None
        """Done once the engine has stopped listening to a coordinator."""
        self.listening: Listening | None = None
        self._entries: dict[str, _Entry] = {}
        self._loop = _loop()
        self._is_decode_only: bool | None = None
        self.state = States.RUNNING
        self._state_events = {States[name]: asyncio.Event() for name in WAITED_FOR}
        self._state_events[States.RUNNING].set()

    # ------------------------------------------------------------------ requests and steps of a script
    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: Any = None,
        precomputed_block_hashes: Any = None,
        **images: Any,
    ) -> asyncio.Future[Any]:
        """Queue a prompt -> a future of its record, which a later step sets. precomputed_block_hashes: not read; the
        engine hashes blocks itself. Raises RequestError for a prompt or parameters that cannot be served."""
        refuse_images(images)
        params = MegatronParams() if sampling_params is None else sampling_params
        given = prompt_of(prompt)
        text = given if isinstance(given, str) else None
        ids = self.controller.tokenize_prompt(self.controller.tokenizer, given) if isinstance(given, str) else given
        own = SamplingParams.from_megatron(params, num_prompt_tokens=len(ids))
        if str(request_id) in self._entries:
            raise RequestError(f"request {request_id} is unfinished; give each request an id of its own")
        if self.inner.relay.is_leader:
            self.inner.add_request(ids, own, request_id=str(request_id), stream="final")
        request = DynamicInferenceRequest(request_id=request_id, prompt=text, sampling_params=params)
        request.prompt_tokens = ids
        entry = _Entry(request, _loop(self._loop).create_future())
        self._entries[str(request_id)] = entry
        return entry.future

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """An unfinished request as it was added: its tokens come with its record."""
        return self._entries[str(request_id)].request

    def has_unfinished_requests(self) -> bool:
        return self.inner.has_unfinished()

    def step_modern(self) -> dict[str, Any]:
        """One step -> ids that are unfinished, records of requests that finished, and the step's seconds.

        Raises megatron-core's EngineSuspendedError while the engine is suspended.
        """
        if self.inner.state is ours.EngineState.SUSPENDED:
            raise theirs.EngineSuspendedError(self.context.step_count)
        began, prefilled = time.perf_counter(), self.context.lifetime_prefill_token_count
        records = [self._finish(output) for output in self.inner.step() if output.finished]
        self._is_decode_only = self.context.lifetime_prefill_token_count == prefilled
        return {
            "active_request_ids": [entry.request.request_id for entry in self._entries.values()],
            "finished_request_records": records,
            "step_time": time.perf_counter() - began,
            "cuda_graph_request_count": None,
        }

    async def async_step(self) -> dict[str, Any]:
        """`step_modern`, which the event loop waits for."""
        return self.step_modern()

    def _finish(self, output: RequestOutput) -> Any:
        request, future = self._entries.pop(output.request_id)
        result = result_of(output, request.request_id, request.prompt, request.sampling_params, self.codec)
        record = DynamicInferenceRequestRecord.from_request(result)
        if not future.done():
            future.set_result(record)
        return record

    @property
    def decode_only(self) -> Any:
        """Whether the last step computed no prompt: `launched` of megatron-core's pair."""
        return theirs.DecodeOnly(consumed=None, launched=self._is_decode_only)

    def generate(self, prompts: Sequence[Any], sampling_params: Any = None) -> list[Any]:
        """Run prompts to the end -> their records, in order."""
        for prompt in prompts:
            self.add_request(next(self.request_counter), prompt, sampling_params)
        records: list[Any] = []
        while self.has_unfinished_requests():
            records += self.step_modern()["finished_request_records"]
        return sorted(records, key=lambda record: record.request_id)

    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Step whenever there is a request, until it is cancelled."""
        while True:
            is_able = self.inner.state is ours.EngineState.RUNNING and self.has_unfinished_requests()
            if is_able:
                self.step_modern()
            await asyncio.sleep(0 if is_able else 0.005)

    def reset(self) -> None:
        """Abort unfinished requests and forget cached prompts. Figures go on counting."""
        for request_id, entry in self._entries.items():
            entry.future.cancel()
            if self.inner.relay.is_leader:
                self.inner.abort(request_id)
        self._entries.clear()
        self.inner.reset_prefix_cache()
        self.request_counter = itertools.count()

    # ------------------------------------------------------------------ memory
    def suspend(self) -> None:
        """Give memory back by the config's kv_cache_management_mode; nothing happens while suspended."""
        if self.inner.state is not ours.EngineState.SUSPENDED:
            self.inner.suspend()
            self.reach("SUSPENDED")

    def resume(self) -> None:
        """Take memory back; nothing happens to an engine that is not suspended."""
        if self.inner.state is ours.EngineState.SUSPENDED:
            self.inner.resume()
            self.reach("RESUMED" if self.inner.state is ours.EngineState.PAUSED else "RUNNING")

    # ------------------------------------------------------------------ a coordinator's requests
    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> str:
        """Serve the requests of a coordinator on a thread, until a client stops the engines -> its address.

        Called on every rank. The coordinator is this package's, on a thread of rank 0, unless
        launch_inference_coordinator is False: then one listens at hostname and port.
        """
        if coordinator_schedule_output_path is not None:
            raise ConfigError("coordinator_schedule_output_path: the coordinator here writes no schedule; leave it out")
        if self.listening is not None and not self.engine_loop_task.done():
            raise WrongState(f"the engine listens to {self.listening.address} already", state=self.state.name)
        here = asyncio.get_running_loop() if loop is None else loop
        self.engine_loop_task = here.create_future()
        self.listening = Listening(self, here, inference_coordinator_port, hostname, launch_inference_coordinator)
        return self.listening.address

    async def wait_until(self, state: Any) -> None:
        """Wait until all ranks are in the state. Raises what ended the engine, or kept it from a state."""
        if state not in self._state_events:
            raise ValueError(f"{state} is passed through, not waited for; one of {', '.join(WAITED_FOR)}")
        waiting = asyncio.ensure_future(self._state_events[state].wait())
        ended = () if self.engine_loop_task is None or state is States.STOPPED else (self.engine_loop_task,)
        await asyncio.wait({waiting, *ended}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return
        waiting.cancel()
        assert self.engine_loop_task is not None
        self.engine_loop_task.result()
        raise WrongState(f"the engine has stopped, and does not reach {state}", state=self.state.name)

    def reach(self, name: str) -> None:
        """Set and clear the events of a state that all ranks have reached; on the event loop that waits for them."""
        self.state = States.PAUSED if name == "RESUMED" else States[name]
        for event in ENDS[name]:
            self._state_events[States[event]].clear()
        self._state_events[States[name]].set()


def _loop(before: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """The loop that runs here, or one that futures can belong to."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return before or asyncio.new_event_loop()
