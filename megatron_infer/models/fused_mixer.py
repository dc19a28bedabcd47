"""The Mamba-2 mixer on live weights: project, scan by state slot, gate, norm, project. Legend: kernels/ssm.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import StepInputs
from megatron_infer.kernels.ssm import SsmSpec, SsmWeights
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.fused_layers import FusedLinear, LayerOp, LayerOps, Parameters
from megatron_infer.models.mamba_mixer import GatedRMSNorm, is_stock_norm, spec_of
from megatron_infer.models.te_apex import qualified
from megatron_infer.models.tp_collectives import Reducer

Columns = tuple[Tensor, ...]
"""gate [T, M], xBC [T, C], dt [T, H]."""


class SplitColumns(LayerOp):
    """The projection [T, X] -> `Columns`, which are views of it."""

    __slots__ = ("widths",)

    def __init__(self, spec: SsmSpec) -> None:
        self.widths = (spec.inner_width, spec.num_channels, spec.num_heads)

    def run(self, step: StepInputs, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Columns, Tensor | None]:
        return x_TX.split(self.widths, dim=-1), residual_TD


class Scan(LayerOp):
    """`Columns` -> (y [T, M], gate)."""

    __slots__ = ("layer", "scan_weights", "spec")

    def __init__(self, layer: int, spec: SsmSpec, scan_weights: ScanWeights) -> None:
        self.layer, self.spec, self.scan_weights = layer, spec, scan_weights

    def run(
        self, step: StepInputs, columns: Columns, residual_TD: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        gate_TM, xBC_TC, dt_TH = columns
        return (step.ssm(self.layer, xBC_TC, dt_TH, self.scan_weights.weights, self.spec), gate_TM), residual_TD


class GatedNorm(LayerOp):
    """(y, gate) -> the norm of y * silu(gate), or the product alone where the mixer has no norm."""

    __slots__ = ("eps", "group_size", "parameters")

    def __init__(self, mixer: Any, inner_width: int) -> None:
        self.parameters: Parameters | None = None
        self.eps, self.group_size = 0.0, inner_width
        if mixer.rmsnorm:
            self.parameters, self.eps = mixer.norm._parameters, mixer.norm.eps
            self.group_size = mixer.norm.group_size or inner_width

    @property
    def weight(self) -> Tensor | None:
        return None if self.parameters is None else self.parameters["weight"]

    def run(
        self, step: StepInputs, x: tuple[Tensor, Tensor], residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y_TM, gate_TM = x
        out_TM = step.ops.gated_rms_norm(y_TM, gate_TM, self.weight, self.eps, group_size=self.group_size)
        return out_TM, residual_TD


class FusedMixer(LayerOps):
    """One Mamba-2 mixer."""

    __slots__ = ("gated_norm", "scan_weights", "spec")

    def __init__(self, mixer: Any, name: str, *, layer: int, tp: Reducer | None) -> None:
        _refuse_unsupported(mixer, name)
        in_proj = FusedLinear(mixer.in_proj, f"{name}.in_proj", tp=tp, norm_apart=True)
        out_proj = FusedLinear(mixer.out_proj, f"{name}.out_proj", tp=tp)
        self.spec = spec_of(mixer)
        self.gated_norm = GatedNorm(mixer, self.spec.inner_width)
        self.scan_weights = ScanWeights(mixer)
        self._check_shapes(name)
        scan = Scan(layer, self.spec, self.scan_weights)
        super().__init__(*in_proj.flat(), SplitColumns(self.spec), scan, self.gated_norm, *out_proj.flat())

    def _check_shapes(self, name: str) -> None:
        """Raise AdoptionError for a parameter whose shape is not what the spec says."""
        spec, weights, gated_norm = self.spec, self.scan_weights.weights, self.gated_norm
        heads, channels = (spec.num_heads,), (spec.num_channels,)
        expected: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
            "conv1d.weight": (weights.conv_CW, [(spec.num_channels, spec.conv_width)]),
            "conv1d.bias": (weights.conv_bias_C, [channels]),
            "A_log": (weights.decay_H, [heads]),
            "D": (weights.skip_H, [heads, (spec.inner_width,)]),
            "dt_bias": (weights.dt_bias_H, [heads]),
            "norm.weight": (gated_norm.weight, [(spec.inner_width,)]),
        }
        for part, (tensor, shapes) in expected.items():
            if tensor is not None and tuple(tensor.shape) not in shapes:
                raise AdoptionError(f"{name}.{part}", f"shape {tuple(tensor.shape)}, expected {shapes[0]}")
        if spec.inner_width % gated_norm.group_size:
            raise AdoptionError(
                f"{name}.norm", f"groups of {gated_norm.group_size} do not divide {spec.inner_width} channels"
            )


def _refuse_unsupported(mixer: Any, name: str) -> None:
    """Raise AdoptionError for what the scan would not compute."""
    if getattr(mixer, "norm_before_gate", False):
        raise AdoptionError(name, "norm_before_gate: the norm comes after the gate here")
    if getattr(mixer, "activation", "silu") != "silu":
        raise AdoptionError(name, f"activation {mixer.activation!r} behind the convolution; only silu is known")
    if mixer.rmsnorm:
        norm = mixer.norm
        if type(norm) is not GatedRMSNorm and not is_stock_norm(type(norm)):
            raise AdoptionError(f"{name}.norm", f"norm class {qualified(norm)} is not known")
        if norm._parameters.get("bias") is not None or norm._parameters["weight"] is None:
            raise AdoptionError(f"{name}.norm", "a gated norm with a bias or without a weight")


class ScanWeights:
    """A copy of what a mixer's scan needs, derived from its live parameters; `refresh` after every change of them.

    fp32 parameters are aliased. What had to be computed (the decay, and parameters of another dtype) keeps its address
    from one refresh to the next.
    """

    __slots__ = ("_owned", "_sources", "weights")

    def __init__(self, mixer: Any) -> None:
        own: Parameters = mixer._parameters
        conv, weight, bias = mcore.conv_parameters(mixer)
        # The modules' own mappings: a parameter that training replaces is the next one read.
        self._sources: dict[str, tuple[Parameters, str]] = {
            "conv_CW": (conv, weight),
            "conv_bias_C": (conv, bias),
            "decay_H": (own, "A_log"),
            "skip_H": (own, "D"),
            "dt_bias_H": (own, "dt_bias"),
        }
        self._owned: set[str] = set()
        self.weights: SsmWeights
        self.refresh()

    def refresh(self) -> None:
        """Derive again from the parameters as they are now."""
        weights: dict[str, Tensor | None] = {}
        owned = set()
        # Not under a caller's inference mode: its tensors could not be written to by a refresh outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, (parameters, key) in self._sources.items():
                parameter = parameters[key]
                weights[name] = fresh = _derived(name, parameter)
                if parameter is None or fresh is None:
                    continue
                if parameter.untyped_storage().data_ptr() == fresh.untyped_storage().data_ptr():
                    continue
                owned.add(name)
                if name in self._owned:
                    kept = getattr(self.weights, name)
                    if kept.shape == fresh.shape and kept.device == fresh.device:
                        weights[name] = kept.copy_(fresh)
        self.weights, self._owned = SsmWeights(**weights), owned  # type: ignore[arg-type]

    def live(self) -> SsmWeights:
        """Derived from the parameters as they are now, with gradients; the same bits as after a refresh."""
        found = {name: _formula(name, parameters[key]) for name, (parameters, key) in self._sources.items()}
        return SsmWeights(**found)  # type: ignore[arg-type]

    def differs(self) -> str | None:
        """The name of the first parameter whose copy a refresh would change; None: none would."""
        with torch.no_grad():
            for name, (parameters, key) in self._sources.items():
                fresh, kept = _derived(name, parameters[key]), getattr(self.weights, name)
                is_same = fresh is kept
                if fresh is not None and kept is not None:
                    is_same = (fresh.shape, fresh.device) == (kept.shape, kept.device) and torch.equal(fresh, kept)
                if not is_same:
                    return key if "conv" not in name or key.startswith("conv") else f"conv1d.{key}"
        return None


def _derived(name: str, parameter: Tensor | None) -> Tensor | None:
    """fp32 and contiguous; the parameter's own memory where it is that already."""
    return _formula(name, None if parameter is None else parameter.detach())


def _formula(name: str, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    plain = parameter.float().contiguous()
    if name == "conv_CW":
        return plain.flatten(1)
    return -torch.exp(plain) if name == "decay_H" else plain
