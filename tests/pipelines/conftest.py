"""What tests of several files stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_files import write_models


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory):
    """The working directory: one folder for each small model."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
