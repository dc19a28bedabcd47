"""Recipes: what they ask of a product, with the defaults of the real ones."""

import enum
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self):
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self):
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self):
        return isinstance(self, MXFP8BlockScaling)


def _ignores_others(kind):
    """As a dataclass of pydantic, which those recipes are: what is no field is ignored."""
    made = kind.__init__

    @functools.wraps(made)
    def init(self, **options):
        made(self, **{name: value for name, value in options.items() if name in kind.__dataclass_fields__})

    kind.__init__ = init
    return kind


@_ignores_others
@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: Any = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@_ignores_others
@dataclass
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(default_factory=QParams)
    fp8_quant_fwd_weight: QParams = field(default_factory=QParams)
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(use_split_accumulator=False))
    fp8_dpa: bool = False


@_ignores_others
@dataclass
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = field(default_factory=lambda: QParams(power_2_scale=True))
    fp8_quant_fwd_weight: QParams = field(default_factory=lambda: QParams(power_2_scale=True))
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)


@_ignores_others
@dataclass
class MXFP8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
