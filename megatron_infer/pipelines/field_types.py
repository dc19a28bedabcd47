"""What fields of the configuration tree are made of: a section, its errors, and the values with MAX's names."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError

from megatron_infer.config.inference import StepRanges
from megatron_infer.errors import ConfigError, unknown_name


class Section(BaseModel):
    """A part of the tree: types are strict, unknown names are refused, equality is that of the values."""

    model_config = ConfigDict(
        strict=True, extra="forbid", validate_assignment=True, protected_namespaces=(), use_attribute_docstrings=True
    )
    _is_frozen: bool = PrivateAttr(default=False)

    def freeze(self) -> None:
        """Refuse assignments from now on."""
        self._is_frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and self._is_frozen:
            raise ConfigError(
                f"{name} cannot be set: the config is resolved, which froze it; make another {type(self).__name__}"
            )
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            if error.errors()[0]["type"] == "no_such_attribute":
                message = unknown_name(f"field of {type(self).__name__}", name, type(self).model_fields)
                hint = "" if "did you mean" in message else "; flat names are for the constructor"
                raise ConfigError(message + hint) from None
            raise ConfigError(validation_text(error)) from None


def validation_text(error: ValidationError) -> str:
    """Every wrong field: its name, what was given, and what it must be."""
    parts = []
    for one in error.errors():
        name = ".".join(str(part) for part in one["loc"])
        expected = one["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
        if one["type"] == "list_type" and isinstance(one["input"], str):
            expected = f"it must be a list: [{one['input']!r}]"
        parts.append(f"{name} is {one['input']!r} ({type(one['input']).__name__}), {expected}")
    return "; ".join(parts)


def by_name(kind: type[Enum]) -> BeforeValidator:
    """Takes a member by its name or value, in any case; True and False, which YAML reads on and off as, are these."""

    def find(value: object) -> object:
        if isinstance(value, bool):
            value = "on" if value else "off"
        if value is None or isinstance(value, kind):
            return value
        for member in kind if isinstance(value, str) else ():
            if value.lower() in (member.name.lower(), str(member.value).lower()):
                return member
        raise ValueError(f"it must be one of {', '.join(member.value for member in kind)}")

    return BeforeValidator(find)


def _as_text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""A text that YAML may read as a number or a truth value: pdl_level: 0, use_vendor_blas: true."""


class PipelineRole(str, Enum):
    """What a server does of a request."""

    PrefillAndDecode = "prefill_and_decode"
    """All of it."""
    PrefillOnly = "prefill_only"
    """Prompts only; their keys and values go to another server."""
    DecodeOnly = "decode_only"
    """Output only, from keys and values of another server."""


class CacheStrategy(str, Enum):
    """How keys and values are kept."""

    MODEL_DEFAULT = "model_default"
    """The engine's own layout: paged."""
    PAGED = "paged"
    """In blocks."""


GPUProfilingMode = StepRanges
"""Which ranges a profiler sees."""


class QuantizationEncoding(str, Enum):
    """How weights are stored, and what they are computed in."""

    FLOAT32 = "float32"
    """Computed in float32."""
    BFLOAT16 = "bfloat16"
    """Computed in bfloat16."""
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q4_K = "q4_k"
    Q6_K = "q6_k"
    """The four encodings of GGUF files are dequantised when the model is loaded."""
    FLOAT8_E4M3FN = "float8_e4m3fn"
    """For a model that trains in FP8."""
    FLOAT4_E2M1FNX2 = "float4_e2m1fnx2"
    """Refused."""
    GPTQ = "gptq"
    """Refused."""


class RopeType(str, Enum):
    """How positions are encoded by rotation."""

    NONE = "none"
    """Not at all."""
    NORMAL = "normal"
    """Pairs of neighbours are rotated (GGUF files of Llama)."""
    NEOX = "neox"
    """The two halves of a head are rotated."""
    LONGROPE = "longrope"
    """Refused: no model family here has it."""
    YARN = "yarn"
    """Refused: no model family here has it."""
