"""`request_metadata_types`: scalars that a caller gives with each request, and those that Megatron fills by itself.

Needs no torch: dtypes are known by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from megatron_infer.errors import ConfigError, RequestError, unknown_name

if TYPE_CHECKING:
    from megatron_infer.config.sampling_params import SamplingParams

Scalar = bool | int | float

INT_BITS = {"uint8": (0, 8), "int8": (7, 7), "int16": (15, 15), "int32": (31, 31), "int64": (63, 63)}
"""Dtype -> the powers of two that a value lies between: at least -2**a (0 of unsigned), less than 2**b."""
FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": None}
"""Dtype -> its largest finite value; None: Python's own."""
DTYPES = ("bool", *INT_BITS, *FLOAT_MAX)


def _termination_id(params: SamplingParams, stop_ids: Iterable[int]) -> int:
    """The first stop token that the request names, else the least id that ends it; -1: none does."""
    return next(iter(params.stop_token_ids), min(stop_ids, default=-1))


FILLED: Mapping[str, Callable[[SamplingParams, Iterable[int]], Scalar]] = {
    "temperature": lambda params, _: params.temperature,
    "top_k": lambda params, _: params.top_k,
    "top_p": lambda params, _: 0.0 if params.top_p == 1.0 else params.top_p,
    "termination_id": _termination_id,
    "return_log_probs": lambda params, _: params.logprobs is not None,
    "skip_prompt_log_probs": lambda params, _: params.logprobs is not None and params.prompt_logprobs is None,
    "top_n_logprobs": lambda params, _: params.logprobs or 0,
}
"""Label that Megatron fills from a request's sampling parameters -> the value that it has there, from ours and the ids
that end the request."""


def dtype_name(dtype: object) -> str:
    """ "float32" of torch.float32, or of that name itself."""
    return str(dtype).removeprefix("torch.")


def check_types(types: object) -> None:
    """Raise ConfigError for anything but a list of (label, dtype, whether values are on the device), or None."""
    if types is None:
        return
    what = "request_metadata_types"
    if isinstance(types, str | Mapping) or not isinstance(types, Sequence):
        raise ConfigError(f"{what} is {types!r}, it must be a list of (label, dtype, on device) or None")
    labels: set[str] = set()
    for one in types:
        if isinstance(one, str) or not isinstance(one, Sequence) or len(one) != 3:
            raise ConfigError(f"{what} has {one!r}, each entry is (label, dtype, on device)")
        label, dtype, on_device = one
        if not isinstance(label, str) or not label:
            raise ConfigError(f"{what} has the label {label!r}, a label is a non-empty str")
        if label in labels:
            raise ConfigError(f"{what} has the label {label!r} twice; give each value a label of its own")
        labels.add(label)
        if dtype_name(dtype) not in DTYPES:
            raise ConfigError(f"{what}: {label!r} has dtype {dtype!r}, it must be one of torch.{', '.join(DTYPES)}")
        if not isinstance(on_device, bool):
            raise ConfigError(f"{what}: {label!r} has {on_device!r} for 'on device', it must be True or False")


def value_of(label: str, params: SamplingParams, stop_ids: Iterable[int]) -> Scalar:
    """The value of a request for a label. stop_ids: tokens that end the request."""
    if (fill := FILLED.get(label)) is not None:
        return fill(params, stop_ids)
    return (params.metadata or {})[label]


def check_metadata(
    types: Sequence[tuple[str, Any, bool]] | None, params: SamplingParams, stop_ids: Iterable[int]
) -> None:
    """Raise RequestError, naming the label, unless a request has one fitting value for each of `types`."""
    metadata = params.metadata
    labels = [label for label, _, _ in types or () if label not in FILLED]
    for label in metadata or ():
        if label in FILLED:
            raise RequestError(f"metadata has {label!r}, which is filled from the sampling parameters; leave it out")
        if label not in labels:
            if not labels:
                raise RequestError(
                    f"metadata has {label!r}, this engine takes none; name it in "
                    "InferenceConfig(request_metadata_types=[(label, dtype, on device)])"
                )
            raise RequestError(f"metadata: {unknown_name('label', label, labels)}; known are {', '.join(labels)}")
    for label, dtype, _ in types or ():
        if label in labels and label not in (metadata or {}):
            raise RequestError(f"metadata lacks {label!r}, which request_metadata_types names; give a value")
        _check_value(label, dtype_name(dtype), value_of(label, params, stop_ids))


def checked_scalars(metadata: object) -> dict[str, Scalar] | None:
    """`metadata` with plain values. Raises RequestError unless it maps labels to finite numbers or bools."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise RequestError(f"metadata is a mapping of labels to numbers, got {metadata!r}")
    return {label: _plain(label, value) for label, value in metadata.items()}


def _plain(label: object, value: object) -> Scalar:
    if not isinstance(label, str):
        raise RequestError(f"metadata has the label {label!r}, a label is a str")
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RequestError(f"metadata[{label!r}] is a finite number or a bool, got {value!r} ({type(value).__name__})")
    return float(value)


def _check_value(label: str, dtype: str, value: Scalar) -> None:
    if dtype == "bool" or isinstance(value, bool):
        fits = dtype == "bool" and isinstance(value, bool)
    elif dtype in INT_BITS:
        low, high = INT_BITS[dtype]
        fits = isinstance(value, int) and (-(2**low) if low else 0) <= value < 2**high
    else:
        fits = abs(value) <= (FLOAT_MAX[dtype] or math.inf)
    if not fits:
        raise RequestError(
            f"metadata[{label!r}] is {value!r} ({type(value).__name__}), request_metadata_types has it as {dtype}"
        )
