"""One torch thread: tiny models are faster so, and two processes do not fight over cores."""

from pathlib import Path

import pytest
import torch
from tiny import FIXTURES

from nextn.model import Model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fixture_folder() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def trained() -> dict[str, Model]:
    """The trained fixtures, in fp32. Shared: a test that changes a model changes a copy."""
    return {folder.name: Model.load(folder, dtype=torch.float32) for folder in sorted(FIXTURES.iterdir())}
