"""What `ktqueue batch status` shows of a batch that runs."""

import pytest

from ktqueue.cli.batch.view import show

PROGRESS = {"tokens_per_second": 6133.5, "seconds_left": 30.4, "running": 64, "waiting": 960, "held_by": "pages, rows"}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "64 running, 960 waiting: the cache is full, all rows are taken"),
        ({"held_by": None, "waiting": 0}, "64 running, 0 waiting"),
        ({"held_by": "a reason of a newer version"}, "64 running, 960 waiting: a reason of a newer version"),
        ({"running": None, "waiting": None}, None),
    ],
)
def test_what_is_in_flight_and_why_no_more(
    changes: dict[str, object], shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    show({"id": "batch_1", "status": "in_progress", "progress": PROGRESS | changes})
    out = capsys.readouterr().out
    assert "6134 tok/s" in out
    assert "30 s" in out
    assert ("in flight" in out) == (shown is not None)
    assert shown is None or shown in out
