"""The bar of `ktqueue batch run` says what its lines wait for."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_worker import CARD

from ktqueue.batches.input import read_lines, survey
from ktqueue.batches.line_runner import LineOptions, LineRunner
from ktqueue.batches.output import BatchOutput
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.cli.batch import session
from ktqueue.cli.batch.view import note
from ktqueue.cli.terminal.progress import Bar
from ktqueue.core.config import BrokerConfig


async def test_the_model_whose_last_worker_left_is_named(
    broker_config: BrokerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    waits = asyncio.Event()

    class SeenBar(Bar):
        def update(self, done: int, total: int | None = None, note: str = "") -> None:
            notes.append(note)
            if note.startswith("waiting"):
                waits.set()

    monkeypatch.setattr(session, "Bar", SeenBar)
    monkeypatch.setattr(session, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(session, "WORKER_CHECK_SECONDS", 0.01)
    source = tmp_path / "in.jsonl"
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "teller", "prompt": "Once"}}
    source.write_text(json.dumps(body) + "\n")
    async with await Broker.open(broker_config) as broker:
        await Lease.register(broker, replace(CARD, name="other"))
        gone = await Lease.register(broker, replace(CARD, aliases=("teller",)))
        await gone.close()
        runner = LineRunner(broker, LineOptions())
        line = asyncio.create_task(runner.run(next(read_lines(source)), "batch-1-1"))
        async with asyncio.timeout(20):
            while not (flight := await runner.in_flight()).waiting:  # noqa: ASYNC110 # what it asks of has no event
                await asyncio.sleep(0.01)
        assert flight.held_by == "workers"
        line.cancel()
        job = session.BatchJob(source=source, target=tmp_path / "out.jsonl")
        output = BatchOutput(job.target)
        running = asyncio.create_task(session.session(broker_config, job, survey(source, model=None), output))
        async with asyncio.timeout(20):
            await waits.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert notes[-2] == "waiting for a worker of teller"


def test_the_bar_of_a_followed_batch_names_its_model() -> None:
    batch = {"status": "in_progress", "model": "teller", "progress": {"held_by": "workers", "tokens_per_second": 1.0}}
    assert note(batch) == "waiting for a worker of teller"
