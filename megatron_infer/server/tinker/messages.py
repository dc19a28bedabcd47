"""The protobuf messages of the Tinker API, made from a table of their fields (public names and numbers)."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_infer.errors import RequestError
from megatron_infer.server.http_errors import ApiError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as error:  # pragma: no cover
    raise ImportError("the Tinker API needs protobuf: pip install 'megatron-infer[tinker]'") from error

PACKAGE = "megatron_infer.server.tinker"

# NAME: {field: (number, type)}. A type with * is repeated, with {} the value of a map with text keys.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "EncodedText": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedText"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "Tensor{}")},
    "Setting": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "double{}"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "Setting{}"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "BatchedTensor{}"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord*"),
        "metrics": (3, "double{}"),
    },
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence*"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
    },
}

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Of tensors, by their number; bfloat16 (4) is not sent by the SDK."""
FLOAT32 = 1


def _file() -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        one = file.message_type.add(name=name)
        for field, (number, given) in fields.items():
            kind = given.rstrip("*{}")
            entry = one
            place = {"name": field, "number": number}
            if given.endswith("{}"):
                entry = one.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
                type_name = f".{PACKAGE}.{name}.{entry.name}"
                one.field.add(**place, type=kinds.TYPE_MESSAGE, type_name=type_name, label=kinds.LABEL_REPEATED)
                place = {"name": "value", "number": 2}
            label = kinds.LABEL_REPEATED if given.endswith("*") else kinds.LABEL_OPTIONAL
            if kind in _MESSAGES:
                entry.field.add(**place, type=kinds.TYPE_MESSAGE, type_name=f".{PACKAGE}.{kind}", label=label)
            else:
                entry.field.add(**place, type=getattr(kinds, f"TYPE_{kind.upper()}"), label=label)
    return file


MAX_FIELDS = 1 << 19
"""Most fields of a message and of those within it, with the numbers of lists of integers. protobuf parses more of them
at once than other threads can wait for, into up to 36 times the bytes that they have."""

_WITHIN: dict[str, dict[int, str]] = {}
"""Message type, or entry type of a map -> field number -> type of the submessage or packed integers in that field."""
for _name, _fields in _MESSAGES.items():
    _found = _WITHIN.setdefault(_name, {})
    for _number, _given in _fields.values():
        _kind = _given.rstrip("*{}")
        if _given.endswith("{}"):
            _WITHIN[f"{_kind}{{}}"] = {2: _kind} if _kind in _MESSAGES else {}
            _found[_number] = f"{_kind}{{}}"
        elif _kind in _MESSAGES or _given == "int64*":
            _found[_number] = _kind


def check_structure(name: str, content: bytes) -> None:
    """Raises ApiError 413 for a message of more than MAX_FIELDS, which are counted without an object for each.

    Of damaged content it counts what comes before the damage; `read` refuses that.
    """
    if len(content) <= 2 * MAX_FIELDS:  # a field has two bytes
        return
    count, place = 0, 0
    around: list[tuple[int, dict[int, str]]] = [(len(content), _WITHIN[name])]
    """The end of each message that `place` is in, and what may be within."""

    def varint() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 70, 7):
            byte = content[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise IndexError("longer than 64 bits")

    try:
        while around:
            end, within = around[-1]
            if place >= end:
                around.pop()
                continue
            tag = varint()
            count += 1
            if tag & 7 == 0:
                varint()
            elif tag & 7 == 1:
                place += 8
            elif tag & 7 == 5:
                place += 4
            elif tag & 7 == 2:
                size, kind = varint(), within.get(tag >> 3)
                if kind in _WITHIN:
                    around.append((min(place + size, end), _WITHIN[kind]))
                else:
                    count += size if kind else 0
                    place += size
            if count > MAX_FIELDS:
                text = f"the body has more than {MAX_FIELDS:,} fields and integers; send fewer sequences at once"
                raise ApiError(413, text, code="body_too_large")
    except IndexError:
        return


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def message(name: str) -> Any:
    """A new message of the table."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))()


def read(name: str, content: bytes) -> Any:
    """A message of the table. Raises RequestError, and ApiError 413."""
    check_structure(name, content)
    made = message(name)
    try:
        made.ParseFromString(content)
    except DecodeError as error:
        raise RequestError(f"body: no {name}: {error}") from None
    return made


def tensor_of(sent: Any) -> np.ndarray[Any, Any]:
    """A Tensor as an array of its shape. Raises ValueError."""
    if sent.dtype not in DTYPES:
        raise ValueError(f"dtype {sent.dtype} is not one of {sorted(DTYPES)}")
    if sent.HasField("sparse_csr"):
        raise ValueError("sparse tensors are not supported; send it dense")
    if len(sent.dense) % DTYPES[sent.dtype].itemsize:
        raise ValueError(f"{len(sent.dense)} bytes are no whole number of elements")
    array = np.frombuffer(sent.dense, DTYPES[sent.dtype])
    shaped: np.ndarray[Any, Any] = array.reshape([int(size) for size in sent.shape]) if sent.shape else array
    return shaped


def floats(values: Any) -> bytes:
    """Numbers as the bytes of float32."""
    content: bytes = np.asarray(values, "<f4").tobytes()
    return content
