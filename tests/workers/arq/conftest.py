"""Fixtures for tests of batches and the bridge in a control worker."""

import pytest

from ktqueue.batches.stored import batch, execution


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch write segments often, and wait little for late events at its end."""
    monkeypatch.setattr(execution, "SEGMENT_SECONDS", 0.05)
    monkeypatch.setattr(batch, "SETTLE_SECONDS", 0.01)
