"""What the kernel says of memory and processor is read as it is meant."""

from __future__ import annotations

import os
import platform

import pytest

from megatron_infer.utils.host import cpu_flags, free_host_bytes, memory_info


@pytest.mark.skipif(platform.system() != "Linux", reason="/proc is Linux's")
def test_memory_is_in_bytes_and_features_are_the_processors():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_info()["MemTotal"] == pytest.approx(total, rel=0.01) and 2**20 < free_host_bytes() <= total
    assert cpu_flags() & {"sse2", "asimd"}
