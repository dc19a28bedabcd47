"""A training step and a sample by the Tinker API over HTTP, and by a session in process."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import torch
from serve_case import flags, served

from cases.case import Case, Clock, Done, Measure
from megatron_infer import RolloutSession, SamplingParams, attach_lora, open_source
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.server.tinker import messages

RATE, NUM_OUTPUT = 1e-4, 64
ADAM = {"learning_rate": RATE, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
PROMPT = list(range(100, 116))


def sequences_of(args: argparse.Namespace) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(4, 4000, args.length).tolist() for _ in range(args.sequences)]


class InProcess:
    """The step as a script makes it: the adapter on the live model, its optimizer, a session."""

    def __init__(self, args: argparse.Namespace) -> None:
        model = build_model(open_source(args.model), dtype=getattr(torch, args.dtype))
        self._adapter = attach_lora(model, rank=args.rank, alpha=32)
        self._session = RolloutSession(model, {"buffer_size_gb": 0.5}, meter=None)
        self._optimizer = torch.optim.AdamW(self._adapter.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
        self._sequences = sequences_of(args)

    def step(self, clock: Clock) -> Done:
        params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0, detokenize=False)
        with clock:
            with self._session.training():
                report = self._session.score_and_backward(
                    self._sequences, lambda scores, _: -torch.cat(list(scores)).sum()
                )
                norm = self._session.step(self._optimizer).grad_norm
            with self._session.generating() as roll:
                (group,) = roll.generate([PROMPT], params)
        assert len(group.samples[0].token_ids) == NUM_OUTPUT
        return Done(1, {"loss": report.loss, "norm": float(norm or 0)})


class OverHttp:
    """The same by the protocol, from the server's process."""

    def __init__(self, args: argparse.Namespace, http: httpx.Client) -> None:
        self._http, self._seq = http, 0
        session = self._post("create_session", {})["session_id"]
        lora = {"rank": args.rank, "seed": 0}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "bench", "lora_config": lora}
        self._model = self._result("create_model", body)["model_id"]
        self._sent = messages.message("ForwardBackwardRequest")
        self._sent.model_id, self._sent.loss_fn = self._model, "cross_entropy"
        for ids in sequences_of(args):
            datum = self._sent.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(ids[:-1], "<i4").tobytes()
            for name, values, dtype in (
                ("target_tokens", np.asarray(ids[1:], "<i8"), 2),
                ("weights", np.ones(len(ids) - 1, "<f4"), 1),
            ):
                field = datum.loss_fn_inputs[name]
                field.dense, field.dtype = values.tobytes(), dtype

    def step(self, clock: Clock) -> Done:
        with clock:
            batch, step = self._send_batch(), self._start("optim_step", adam_params=ADAM)
            saved = self._start("save_weights_for_sampler", sampling_session_seq_id=self._seq)
            made = self._parsed("ForwardBackwardOutput", batch)
            norm = self._json(step)["metrics"]["grad_norm"]
            drawn = self._post(
                "asample",
                {
                    "sampling_session_id": self._json(saved)["sampling_session_id"],
                    "prompt": {"chunks": [{"tokens": PROMPT}]},
                    "sampling_params": {"max_tokens": NUM_OUTPUT},
                },
            )
            sample = self._parsed("SampleResponse", drawn)
        return Done(1, {"loss": made.metrics["loss:sum"], "norm": norm, "tokens": len(sample.sequences[0].tokens) // 4})

    def _post(self, route: str, body: Any) -> Any:
        how: Any = {"json": body} if isinstance(body, dict) else {"content": body}
        if "content" in how:
            how["headers"] = {"content-type": "application/x-protobuf"}
        reply = self._http.post(f"/api/v1/{route}", **how)
        assert reply.status_code == 200, reply.text
        return reply.json() if "json" in reply.headers["content-type"] else reply.content

    def _start(self, route: str, **body: Any) -> Any:
        self._seq += 1
        return self._post(route, {"model_id": self._model, "seq_id": self._seq, **body})

    def _send_batch(self) -> Any:
        self._seq += 1
        self._sent.seq_id = self._seq
        return self._post("forward_backward", self._sent.SerializeToString())

    def _json(self, future: Any) -> Any:
        result = self._post("retrieve_future", {"request_id": future["request_id"]})
        assert isinstance(result, bytes) or "error" not in result, result
        return result

    def _parsed(self, kind: str, future: Any) -> Any:
        made = messages.message(kind)
        made.ParseFromString(self._json(future))
        return made

    def _result(self, route: str, body: dict[str, Any]) -> Any:
        return self._json(self._post(route, body))


@contextlib.contextmanager
def steps(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    options = {"dtype": args.dtype, "threads": args.threads, "lora_rank": args.rank, "buffer_size_gb": 0.5}
    durable = "--durable" if args.durable else "--no-durable"
    with (
        tempfile.TemporaryDirectory() as folder,
        served(
            args.model, *flags(options | {"served_model_name": "bench", "state_dir": folder}), durable, command="tinker"
        ) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        variants = {"session": InProcess(args).step, "over HTTP": OverHttp(args, http).step}
        what = f"{args.sequences} x {args.length} tokens trained, {NUM_OUTPUT} sampled"
        yield [Measure(what, "step", variants)]


CASES = {
    "tinker": Case(
        about="forward_backward, optim_step and a sample of 64 tokens by the Tinker API and by a session.\n\n"
        "The server is another process with the same number of threads; its CPU time is not in the table. Each step\n"
        "ends before the next variant begins, so one of the two processes computes at a time.",
        prepare=steps,
        rounds=7,
        options={
            "model": "smollm2",
            "dtype": "float32",
            "sequences": 8,
            "length": 64,
            "rank": 32,
            "threads": 1,
            "durable": False,
        },
    ),
}
