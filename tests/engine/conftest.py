"""What the tests of the engine share."""

from __future__ import annotations

import pytest
import torch
from model_kinds import make_model

from megatron_infer.kernels.native import native_build


@pytest.fixture(scope="module")
def kind(request) -> str:
    """The kind of `model`: attention, unless a test or a file asks for others."""
    return getattr(request, "param", "attention")


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    """For tests that leave its weights as they are."""
    return make_model(kind)


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """For tests of what the native kernels alone can do."""
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
