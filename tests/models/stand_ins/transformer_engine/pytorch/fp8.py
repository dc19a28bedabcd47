"""The global state, autocast, and what quantisers are made from: what the real ones write, and when."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantisers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)


@dataclass
class FP8GlobalState:
    fp8_enabled: bool = False
    fp8_parameters: bool = False
    fp8_recipe: Any = None
    fp8_group: Any = None
    autocast_depth: int = 0
    is_first_fp8_module: bool = False
    autocast_arguments: dict = field(default_factory=dict)
    global_amax_history_buffer: dict = field(default_factory=dict)
    global_scale_buffer: dict = field(default_factory=dict)


class FP8GlobalStateManager:
    state = FP8GlobalState()
    reason = ""
    """Why this GPU has no FP8."""

    @classmethod
    def reset(cls):
        cls.state = FP8GlobalState()

    @classmethod
    def is_fp8_available(cls):
        return not cls.reason, cls.reason

    is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available

    @classmethod
    def is_fp8_enabled(cls):
        return cls.state.fp8_enabled

    @classmethod
    def with_fp8_parameters(cls):
        return cls.state.fp8_parameters

    @classmethod
    def get_fp8_recipe(cls):
        return cls.state.fp8_recipe

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        if not fp8_meta["recipe"].delayed() or "buffer_index_and_autocast_key" in fp8_meta:
            return
        key = str(fp8_meta["recipe"])
        fp8_meta["buffer_index_and_autocast_key"] = key
        cls.state.global_amax_history_buffer.setdefault(key, []).append(fp8_meta["scaling_fwd"].amax_history)
        cls.state.global_scale_buffer.setdefault(key, []).append(fp8_meta["scaling_fwd"].scale)

    @classmethod
    def reduce_and_update_fp8_tensors(cls):
        for key, histories in cls.state.global_amax_history_buffer.items():
            for history, scale in zip(histories, cls.state.global_scale_buffer[key], strict=True):
                amax = history.amax(0)
                scale.copy_(torch.where(amax > 0, 448 / amax, scale))
                history.copy_(history.roll(-1, 0))
                history[0] = 0


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    state = FP8GlobalStateManager.state
    before = state.fp8_enabled, state.fp8_recipe, state.fp8_group, state.is_first_fp8_module
    state.autocast_arguments[str(fp8_recipe)] = fp8_recipe, fp8_group
    state.fp8_enabled, state.fp8_recipe, state.fp8_group = enabled, fp8_recipe, fp8_group
    state.is_first_fp8_module = state.is_first_fp8_module or not state.autocast_depth
    state.autocast_depth += 1
    try:
        yield
    finally:
        state.fp8_enabled, state.fp8_recipe, state.fp8_group, state.is_first_fp8_module = before
        state.autocast_depth -= 1
        if enabled and not state.autocast_depth and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors()


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    state = FP8GlobalStateManager.state
    before = state.fp8_parameters, state.fp8_recipe
    state.fp8_parameters, state.fp8_recipe = enabled, recipe if recipe is not None else DelayedScaling()
    try:
        yield
    finally:
        state.fp8_parameters, state.fp8_recipe = before


class RecipeState:
    @staticmethod
    def create(recipe, *, mode, num_quantizers=1, device=None):
        assert mode == "forward" and device is not None, "the real default is a GPU"
        return RecipeState(recipe, num_quantizers, device)

    def __init__(self, recipe, num_quantizers, device):
        self.recipe, self.num_quantizers = recipe, num_quantizers
        if recipe.delayed():
            self.scale = torch.ones(num_quantizers, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, device=device)

    def make_quantizers(self):
        recipe, places = self.recipe, range(self.num_quantizers)
        if recipe.delayed():
            return [Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), "e4m3") for i in places]
        if recipe.float8_current_scaling():
            made = [Float8CurrentScalingQuantizer("e4m3", torch.device("cpu")) for _ in places]
            for quantiser in made:
                quantiser.force_pow_2_scales = recipe.use_power_2_scales
            return made
        if recipe.mxfp8():
            return [MXFP8Quantizer("e4m3") for _ in places]
        forms = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_fwd_inp
        return [
            Float8BlockQuantizer(
                "e4m3",
                rowwise=True,
                columnwise=True,
                force_pow_2_scales=forms[i % 3].power_2_scale,
                block_scaling_dim=2 if i % 3 == 1 else 1,
            )
            for i in places
        ]
