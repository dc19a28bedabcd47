"""JSON bodies of the Tinker API. Fields that a body's type does not have are for other servers, and have no effect."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from megatron_infer.errors import RequestError
from megatron_infer.server.endpoint import Call
from megatron_infer.server.request_body import check_content_type, check_structure

Name = Annotated[str, Meta(max_length=256)]
FileName = Annotated[str, Meta(pattern=r"\A(?!.*\.tmp\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""Name of a checkpoint: a plain file name. NAME.tmp is refused: it is the temporary file of NAME."""


class OfSession(Struct):
    session_id: Name


class LoraConfig(Struct):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Struct):
    session_id: Name
    model_seq_id: int
    base_model: Name
    lora_config: LoraConfig | None = None


class OfModel(Struct):
    model_id: Name
    seq_id: int | None = None
    """From 1 on; 0 and None: it has no place among others."""


NotNegative = Annotated[float, Meta(ge=0, le=1e15)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class AdamParams(Struct):
    learning_rate: NotNegative = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Meta(ge=1e-30, le=1e15)] = 1e-12
    """AdamW divides by what is no 0 in fp32."""
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(OfModel, kw_only=True):
    adam_params: AdamParams


class SaveWeights(OfModel, kw_only=True):
    path: FileName | None = None
    overwrite: bool = False


class MayNameModel(Struct):
    model_id: Name | None = None


class LoadWeights(Struct, kw_only=True):
    """Into a model, or, with session_id and model_seq_id, into one that is made for it."""

    path: Name
    optimizer: bool = False
    model_id: Name | None = None
    seq_id: int | None = None
    session_id: Name | None = None
    model_seq_id: int | None = None
    base_model: Name | None = None


class WeightsInfo(Struct):
    tinker_path: Name


class CreateSamplingSession(Struct):
    session_id: Name
    sampling_session_seq_id: int
    base_model: Name | None = None
    model_path: Name | None = None


class Chunk(Struct):
    type: Name = "encoded_text"
    tokens: list[int] = []


class Prompt(Struct):
    chunks: list[Chunk]


class Sampling(Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Struct):
    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: Name | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    seq_id: int | None = None
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None


class Retrieve(Struct):
    request_id: Name


_T = TypeVar("_T")


def read(call: Call, kind: type[_T]) -> _T:
    """The body of a call. Raises RequestError that names the field, and ApiError for one that is no JSON of this
    server's limits."""
    check_content_type(dict(call.request.scope["headers"]))
    check_structure(call.body)
    try:
        return msgspec.json.decode(call.body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise RequestError(f"body: {error}") from None
