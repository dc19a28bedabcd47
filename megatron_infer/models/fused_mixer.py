"""Mamba-2 mixers and gated delta nets on live weights: project, recur by state slot, gate and norm, project.

Legend: kernels/ssm.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import StepInputs
from megatron_infer.kernels.ssm import DeltaSpec, RecurrentSpec, SsmWeights
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.delta_net import delta_spec_of
from megatron_infer.models.fused_layers import FusedLinear, FusedNorm, LayerOp, LayerOps, Parameters
from megatron_infer.models.mamba_mixer import GatedRMSNorm, is_stock_norm, projection_factors, spec_of
from megatron_infer.models.te_apex import qualified
from megatron_infer.models.tp_collectives import Reducer

Columns = tuple[Tensor, ...]
"""gate [T, M], xBC [T, C], dt [T, H]; of a delta net gate [T, M], qkv [T, C], b and a [T, 2H]."""


class SplitColumns(LayerOp):
    """The projection [T, X], times factors [X] if any, -> `Columns`, which are views of it."""

    def __init__(self, spec: RecurrentSpec, factors: Tensor | None = None) -> None:
        self.widths = (spec.inner_width, spec.num_channels, spec.num_steps)
        self.factors = factors

    def run(self, step: StepInputs, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Columns, Tensor | None]:
        x_TX = x_TX if self.factors is None else x_TX * self.factors
        return x_TX.split(self.widths, dim=-1), residual_TD


class SplitDeltaColumns(LayerOp):
    """The same of a delta net, whose projection has the gate in the middle."""

    def __init__(self, spec: DeltaSpec) -> None:
        self.widths = (spec.num_channels, spec.inner_width, spec.num_steps)

    def run(self, step: StepInputs, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Columns, Tensor | None]:
        qkv_TC, gate_TM, ba_TX = x_TX.split(self.widths, dim=-1)
        return (gate_TM, qkv_TC, ba_TX), residual_TD


class Scan(LayerOp):
    """`Columns` -> (y [T, M], gate)."""

    def __init__(self, layer: int, spec: RecurrentSpec, scan_weights: ScanWeights) -> None:
        self.layer, self.spec, self.scan_weights = layer, spec, scan_weights

    def run(
        self, step: StepInputs, columns: Columns, residual_TD: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        gate_TM, xBC_TC, dt_TX = columns
        return (step.ssm(self.layer, xBC_TC, dt_TX, self.scan_weights.weights, self.spec), gate_TM), residual_TD


class GatedNorm(LayerOp):
    """(y, gate) -> the norm of y * silu(gate), or the product alone where the mixer has no norm."""

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


class NormThenGate(LayerOp):
    """(y, gate) -> norm(y) * silu(gate), with the norm over each head."""

    def __init__(self, norm: FusedNorm, head_dim: int) -> None:
        self.norm, self.head_dim = norm, head_dim

    def run(
        self, step: StepInputs, x: tuple[Tensor, Tensor], residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y_TM, gate_TM = x
        normed_TM = self.norm.norm_heads(step.ops, y_TM.unflatten(-1, (-1, self.head_dim))).flatten(1)
        return step.ops.gated_rms_norm(normed_TM, gate_TM, None, 0.0, group_size=self.head_dim), residual_TD


class RecurrentMixer(LayerOps):
    """The part of a layer that keeps a recurrent state."""

    def __init__(
        self, name: str, spec: RecurrentSpec, scan_weights: ScanWeights, operations: Iterable[LayerOp]
    ) -> None:
        self.name, self.spec, self.scan_weights = name, spec, scan_weights
        super().__init__(*operations)


class FusedDeltaNet(RecurrentMixer):
    """One gated delta net."""

    def __init__(self, net: Any, name: str, *, layer: int, tp: Reducer | None) -> None:
        if not net.use_qk_l2norm:
            raise AdoptionError(name, "use_qk_l2norm=False: the kernels give queries and keys length 1")
        if net.act_fn is not torch.nn.functional.silu:
            raise AdoptionError(name, f"activation {net.act_fn!r}; only silu is known")
        in_proj = FusedLinear(net.in_proj, f"{name}.in_proj", tp=tp, norm_apart=True)
        out_proj = FusedLinear(net.out_proj, f"{name}.out_proj", tp=tp)
        norm = FusedNorm(net.out_norm, f"{name}.out_norm")
        spec, weights = delta_spec_of(net), ScanWeights(net)
        _check_shapes(
            name,
            _scan_shapes(spec, weights.weights)
            | {
                "in_proj.weight": (
                    in_proj.weight()[:, 0],
                    [(spec.num_channels + spec.inner_width + spec.num_steps,)],
                ),
                "out_norm.weight": (norm.parameters["weight"], [(spec.head_dim,)]),
            },
        )
        middle = SplitDeltaColumns(spec), Scan(layer, spec, weights), NormThenGate(norm, spec.head_dim)
        super().__init__(name, spec, weights, (*in_proj.flat(), *middle, *out_proj.flat()))


class FusedMixer(RecurrentMixer):
    """One Mamba-2 mixer."""

    def __init__(self, mixer: Any, name: str, *, layer: int, tp: Reducer | None, of_input: float = 1.0) -> None:
        """of_input: multiplies the input of the mixer."""
        _refuse_unsupported(mixer, name)
        in_proj = FusedLinear(mixer.in_proj, f"{name}.in_proj", tp=tp, norm_apart=True)
        out_proj = FusedLinear(mixer.out_proj, f"{name}.out_proj", tp=tp)
        spec, weights = spec_of(mixer), ScanWeights(mixer)
        gated_norm = GatedNorm(mixer, spec.inner_width)
        _check_shapes(
            name, _scan_shapes(spec, weights.weights) | {"norm.weight": (gated_norm.weight, [(spec.inner_width,)])}
        )
        if spec.inner_width % gated_norm.group_size:
            raise AdoptionError(
                f"{name}.norm", f"groups of {gated_norm.group_size} do not divide {spec.inner_width} channels"
            )
        if of_input != 1.0 and in_proj.parameters["bias"] is not None:
            raise AdoptionError(f"{name}.in_proj", f"a bias, and a factor of its input ({of_input:g}): not supported")
        factors = projection_factors(mixer, of_input=of_input)
        middle = SplitColumns(spec, factors), Scan(layer, spec, weights), gated_norm
        super().__init__(name, spec, weights, (*in_proj.flat(), *middle, *out_proj.flat()))


Shapes = dict[str, tuple[Tensor | None, list[tuple[int, ...]]]]
"""Parameter -> (what was read of it, the shapes that it may have)."""


def _scan_shapes(spec: RecurrentSpec, weights: SsmWeights) -> Shapes:
    heads, channels = (spec.num_heads,), (spec.num_channels,)
    return {
        "conv1d.weight": (weights.conv_CW, [(spec.num_channels, spec.conv_width)]),
        "conv1d.bias": (weights.conv_bias_C, [channels]),
        "A_log": (weights.decay_H, [heads]),
        "D": (weights.skip_H, [heads, (spec.inner_width,)]),
        "dt_bias": (weights.dt_bias_H, [heads]),
    }


def _check_shapes(name: str, expected: Shapes) -> None:
    """Raise AdoptionError for a parameter whose shape is not what the spec says."""
    for part, (tensor, shapes) in expected.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise AdoptionError(f"{name}.{part}", f"shape {tuple(tensor.shape)}, expected {shapes[0]}")


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
    """A copy of what a recurrent layer needs, derived from its live parameters; `refresh` after every change of them.

    fp32 parameters are aliased. What had to be computed (the decay, and parameters of another dtype) keeps its address
    from one refresh to the next.
    """

    def __init__(self, mixer: Any) -> None:
        own: Parameters = mixer._parameters
        conv, weight, bias = mcore.conv_parameters(mixer)
        # The modules' own mappings: a parameter that training replaces is the next one read.
        self._sources: dict[str, tuple[Parameters, str]] = {
            "conv_CW": (conv, weight),
            "conv_bias_C": (conv, bias),
            "decay_H": (own, "A_log"),
            "dt_bias_H": (own, "dt_bias"),
        }
        if "D" in own:
            self._sources["skip_H"] = own, "D"
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
