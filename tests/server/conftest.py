"""Fixtures of the folder."""

from __future__ import annotations

import pytest
from scripted import ScriptedEngine
from server_case import client_of


@pytest.fixture(scope="module")
def client(case):
    """OpenAI's client of the module's server."""
    with client_of(case) as one:
        yield one


@pytest.fixture(scope="module")
def engine():
    """Answers as the test says."""
    return ScriptedEngine()
