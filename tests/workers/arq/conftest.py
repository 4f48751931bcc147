"""Fixtures for tests of batches and the bridge in a control worker."""

import pytest

from ktqueue.batches.stored import batch, execution, speed


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch write segments and measure its speed often, and wait little for late events at its end."""
    monkeypatch.setattr(execution, "SEGMENT_SECONDS", 0.05)
    monkeypatch.setattr(batch, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(speed, "LOOK_SECONDS", 0.05)
