"""What tests of overlapping steps share."""

import pytest
import torch

from ktqueue.engine import scheduler
from ktqueue.operators import native


@pytest.fixture
def small_steps_overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 tokens are overlapped. Tests on a device are skipped where there is none."""
    native.set_threads()
    monkeypatch.setattr(scheduler, "LEAST_OVERLAPPED", 8)
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
