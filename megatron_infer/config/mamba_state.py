"""Options for the recurrent states of a model with Mamba layers or delta nets: `MambaInferenceStateConfig`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_infer.config.model_shape import DTYPE_BYTES
from megatron_infer.errors import ConfigError, check_known, unknown_name

if TYPE_CHECKING:
    import torch

LAYER_SYMBOLS: dict[str, str] = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "experts"}
"""Symbol of a layer pattern -> what the layer is."""
DELTA_SYMBOL = "G"
"""A gated delta net. It stands in no pattern: a GPTModel has it in the place of attention."""
PARALLEL_SYMBOL = "P"
"""Attention and Mamba-2 side by side. megatron-core's patterns have a * for it, whose layer is then of this kind."""
STATEFUL = frozenset({"M", DELTA_SYMBOL, PARALLEL_SYMBOL})
"""Symbols of layers that keep a recurrent state."""


@dataclass(frozen=True)
class MambaInferenceStateConfig:
    """Shapes and dtypes of the recurrent state of one request in a model with Mamba layers or gated delta
    nets. Raises ConfigError if wrong."""

    layer_type_list: list[str]
    """One symbol per layer: "M" Mamba, "*" attention, "-" MLP, "E" mixture of experts, "G" gated delta net, "P"
    attention and Mamba side by side."""
    mamba_conv_states_shape: tuple[int, ...]
    """Convolution state per request and layer: (channels, taps)."""
    mamba_ssm_states_shape: tuple[int, ...]
    """Recurrent state per request and layer: (heads, head dim, state dim)."""
    conv_states_dtype: str | None = None
    """float32, bfloat16 or float16. None: the dtype of the activations."""
    ssm_states_dtype: str | None = None
    """float32, bfloat16 or float16. None: float32, since every token adds a rounding error."""

    def __post_init__(self) -> None:
        symbols = (*LAYER_SYMBOLS, DELTA_SYMBOL, PARALLEL_SYMBOL)
        unknown = [kind for kind in self.layer_type_list if kind not in symbols]
        if unknown:
            place = list(self.layer_type_list).index(unknown[0])
            raise ConfigError(
                f"mamba_inference_state_config: layer_type_list[{place}] is {unknown[0]!r}; the symbols are "
                f"{' '.join(symbols)}"
            )
        if not STATEFUL & set(self.layer_type_list):
            raise ConfigError(
                "mamba_inference_state_config: layer_type_list has neither a Mamba layer (M; P with attention) nor "
                f"a gated delta net ({DELTA_SYMBOL}); leave it None"
            )
        for name, rank in (("mamba_conv_states_shape", 2), ("mamba_ssm_states_shape", 3)):
            shape = tuple(getattr(self, name))
            if len(shape) != rank or not all(type(size) is int and size > 0 for size in shape):
                raise ConfigError(
                    f"mamba_inference_state_config: {name} is {shape}, it must be {rank} positive integers"
                )
            object.__setattr__(self, name, shape)
        for name in ("conv_states_dtype", "ssm_states_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise ConfigError(
                    f"mamba_inference_state_config: {name}: {unknown_name('dtype', str(dtype), DTYPE_BYTES)}; one of "
                    f"{', '.join(DTYPE_BYTES)}, or None"
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MambaInferenceStateConfig:
        """From plain values. Raises ConfigError for an unknown or a missing field."""
        known = {item.name: item.default for item in fields(cls)}
        check_known("field", values, known, where="mamba_inference_state_config: ")
        missing = [name for name, default in known.items() if default is MISSING and name not in values]
        if missing:
            raise ConfigError(
                f"mamba_inference_state_config lacks {', '.join(missing)}; "
                "MambaInferenceStateConfig.from_model(model) has them all"
            )
        return cls(**values)

    @classmethod
    def from_model(cls, model: torch.nn.Module | Sequence[torch.nn.Module]) -> MambaInferenceStateConfig | None:
        """The state config of a live megatron-core model, wrapped or not, with stock or adopted mixers or delta nets;
        None without either.

        `model` may be Megatron's list of chunks. Raises ConfigError when its layers have states of different shapes:
        all layers of a slot are alike.
        """
        kinds: list[str] = []
        shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for chunk in model if isinstance(model, (list, tuple)) else getattr(model, "chunks", [model]):
            decoder = _decoder_of(chunk)
            given, layers = getattr(decoder, "layer_type_list", None), getattr(decoder, "layers", None) or ()
            own = layer_symbols(given or "*" * len(layers), layers)
            each = zip(own, layers if STATEFUL & set(own) else own, strict=True)  # others are not read
            shapes += [_state_shapes(layer) for kind, layer in each if kind in STATEFUL]
            kinds += own
        if not shapes:
            return None
        if any(shape != shapes[0] for shape in shapes):
            other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise ConfigError(
                f"recurrent layer {other} keeps states of {shapes[other]}, recurrent layer 0 of {shapes[0]}: all of a "
                "model must keep the same"
            )
        return cls(kinds, *shapes[0])


def _decoder_of(model: Any) -> Any:
    """None: the model has none."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "decoder", None)


def layer_symbols(pattern: Iterable[str], layers: Iterable[Any]) -> list[str]:
    """megatron-core's symbols of the layers, and those of what the symbol of attention stands for in some models."""
    found = list(pattern)
    for number, layer in enumerate(layers):
        if found[number] == "*" and _is_delta(layer):
            found[number] = DELTA_SYMBOL
        elif found[number] == "*" and _mixer_of(layer) is not None:
            found[number] = PARALLEL_SYMBOL
    return found


def _mixer_of(layer: Any) -> Any:
    """None: it has none. Megatron-Bridge's Falcon-H1 calls it otherwise."""
    return getattr(layer, "mixer", None) or getattr(layer, "mamba_mixer", None)


def _is_delta(layer: Any) -> bool:
    """By the names that megatron-core's GatedDeltaNet and ours have: neither is imported here."""
    return hasattr(getattr(layer, "self_attention", None), "num_value_heads")


def _state_shapes(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if _is_delta(layer):
        net = layer.self_attention
        (channels,), (heads,) = net.conv1d.weight.shape[:1], net.dt_bias.shape
        return (channels, net.conv_kernel_dim), (heads, net.value_head_dim, net.key_head_dim)
    conv, ssm = (_mixer_of(layer) or layer).mamba_state_shapes_per_request()
    return tuple(conv), tuple(ssm)
