"""What the tests of the engine share."""

from __future__ import annotations

import pytest

from megatron_infer.kernels import native_build


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """For tests of what the native kernels alone can do."""
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
