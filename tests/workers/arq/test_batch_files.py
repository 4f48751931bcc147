"""The control worker's folder of batch files: files are found by the clock, run once, resumed, and deleted later."""

import asyncio
import contextlib
import functools
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from arq.worker import Worker
from processes import until

from ktqueue.batches.errors import OutputLocked
from ktqueue.batches.input import BatchLine
from ktqueue.batches.output import BatchOutput
from ktqueue.batches.run import BatchRun
from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config, ControlConfig
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import JobState
from ktqueue.workers.arq.batch_files import BatchFiles
from ktqueue.workers.arq.control import ControlWorker
from ktqueue.workers.arq.worker import Retry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("in", "out", "done", "failed"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def config(broker: Broker, folder: Path) -> Config:
    return Config(broker=broker.config, control=ControlConfig(batch_dir=str(folder), keep_files=60.0, crontab=()))


@contextlib.asynccontextmanager
async def running(broker: Broker, config: Config) -> AsyncIterator[ControlWorker]:
    control = ControlWorker(broker, config, broker.config.url or "")
    task = asyncio.create_task(control.async_run())
    await until(lambda: control.connected)
    yield control
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await control.leave()


def write(path: Path, count: int, **body: Any) -> None:
    with path.open("w") as file:
        for number in range(count):
            body_json = {"model": "demo", "prompt": f"The {number}. tale", "max_tokens": 8, **body}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body_json}
            file.write(json.dumps(line) + "\n")


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_file_may_be_asked_for_before_the_first_look(broker: Broker, tmp_path: Path, start_worker: Any) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "first.jsonl", 1)
    async with start_worker():
        files = BatchFiles(broker, ControlConfig(batch_dir=str(tmp_path)))
        assert await files.run({}, "first.jsonl") == {"lines": 1, "answered": 1, "failed": 0}
    assert (tmp_path / "done" / "first.jsonl").exists()


async def test_files_are_found_run_and_moved(broker: Broker, config: Config, folder: Path, start_worker: Any) -> None:
    write(folder / "in" / "good.jsonl", 5)
    write(folder / "in" / "half.jsonl", 1, temperature=900)
    (folder / "in" / "bad.jsonl").write_text("{}\n")
    async with start_worker(), running(broker, config) as control:
        await control.pool.enqueue_job("batches")
        await until(lambda: not list((folder / "in").iterdir()))
        good = await control.pool.get("arq:result:batch:good.jsonl") or b""
    assert {path.name for path in (folder / "done").iterdir()} == {"good.jsonl", "half.jsonl"}
    assert {path.name for path in (folder / "failed").iterdir()} == {"bad.jsonl", "bad.jsonl.txt"}
    assert "bad.jsonl:1: must have custom_id" in (folder / "failed" / "bad.jsonl.txt").read_text()
    answers = {record["custom_id"]: record["response"] for record in records(folder / "out" / "good.jsonl")}
    assert answers.keys() == {f"c{number}" for number in range(5)}
    assert {answer["body"]["usage"]["completion_tokens"] for answer in answers.values()} == {8}
    (failed,) = records(folder / "out" / "half.errors.jsonl")
    assert failed["response"]["status_code"] == 400
    assert good == b"" or json.loads(good)["r"] == {"lines": 5, "answered": 5, "failed": 0}


async def test_a_folder_that_cannot_be_used_is_said_in_one_line(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    control = ControlConfig(batch_dir=str(tmp_path / "file" / "batches"), crontab=())
    async with running(broker, Config(broker=broker.config, control=control)) as worker:
        await worker.pool.enqueue_job("batches")
        await until(lambda: "control.batch_dir cannot be used: [Errno 20] Not a directory" in caplog.text)
        assert "Traceback" not in caplog.text


async def test_files_whose_names_cannot_be_used_are_refused(
    broker: Broker, config: Config, folder: Path, start_worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The names are not UTF-8, or too long for the names of the files that a run writes."""
    names = (b"a\xff.jsonl", b"b" * 249 + b".jsonl")
    for name in (*names, b"c.jsonl"):
        write(Path(os.fsdecode(bytes(folder / "in") + b"/" + name)), 1)
    async with start_worker(), running(broker, config) as control:
        await control.pool.enqueue_job("batches")
        await until(lambda: (folder / "done" / "c.jsonl").exists() and not list((folder / "in").iterdir()))
    assert "Traceback" not in caplog.text
    assert {os.fsencode(path.name) for path in (folder / "failed").iterdir()} >= {*names, b"a\xff.jsonl.txt"}
    assert (folder / "failed" / os.fsdecode(b"a\xff.jsonl.txt")).read_text() == "the name of the file is not UTF-8\n"


async def test_a_worker_that_leaves_waits_until_results_are_written(
    broker: Broker, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    finish = Worker.finish_job

    async def finish_slowly(worker: Worker, *arguments: Any) -> None:
        begun.set()
        await asyncio.sleep(0.2)
        await finish(worker, *arguments)
        ended.set()

    monkeypatch.setattr(Worker, "finish_job", finish_slowly)
    async with running(broker, config) as control:
        await control.pool.enqueue_job("retention")
        await begun.wait()
    assert ended.is_set()


def is_in_the_future(worker: ControlWorker) -> bool:
    """Whether the worker's first cron job waits for its next time."""
    next_run = worker.cron_jobs[0].next_run
    return next_run is not None and next_run > datetime.now(tz=worker.timezone)


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


async def test_an_interrupted_batch_file_continues(
    broker: Broker, config: Config, folder: Path, start_worker: Any
) -> None:
    write(folder / "in" / "long.jsonl", 40, max_tokens=24, ignore_eos=True)
    out = folder / "out" / "long.jsonl"
    async with start_worker():
        for answers in (1, 10):
            async with running(broker, config) as control:
                await control.pool.enqueue_job("batches")
                await until(functools.partial(has_lines, out, answers))
        assert (folder / "in" / "long.jsonl").exists()
        async with running(broker, config):  # the job is still in arq's queue
            await until(lambda: (folder / "done" / "long.jsonl").exists())
    assert Counter(record["custom_id"] for record in records(out)) == {f"c{number}": 1 for number in range(40)}
    assert len(await broker.jobs.list(limit=1000)) == 40  # no line was computed twice


async def test_a_locked_file_runs_later_and_a_bad_name_is_refused(broker: Broker, config: Config, folder: Path) -> None:
    write(folder / "in" / "one.jsonl", 1)
    files = BatchFiles(broker, config.control)
    other = BatchOutput(folder / "out" / "one.jsonl")
    with pytest.raises(Retry) as locked:
        await files.run({}, "one.jsonl")
    assert isinstance(locked.value.__cause__, OutputLocked)
    other.close(finished=False)
    assert (folder / "in" / "one.jsonl").exists()
    secret = folder / "secret.jsonl"
    secret.write_text("{}\n")
    for name in ("../secret.jsonl", "/etc/passwd", "one.txt", "none.jsonl"):
        with pytest.raises(InvalidRequest):
            await files.run({}, name)
    assert secret.exists()  # neither read nor moved


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))


async def test_old_files_are_removed(broker: Broker, config: Config, folder: Path) -> None:
    old = time.time() - 61.0
    names = ["in/going.jsonl", "out/going.jsonl", "out/going.errors.jsonl", "out/going.jsonl.run", "out/past.jsonl",
             "done/past.jsonl", "failed/worse.jsonl.txt", "out/new.jsonl"]  # fmt: skip
    for name in names:
        (folder / name).write_text("")
        if "new" not in name:
            os.utime(folder / name, (old, old))
    assert await BatchFiles(broker, config.control).purge({}) == 3
    assert files(folder) == sorted([*names[:4], "out/new.jsonl"])


async def test_the_prompt_of_a_failed_line_is_deleted_too(broker: Broker, start_worker: Any, tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": ["x" * 4000, "The tale"], "max_tokens": 60, "ignore_eos": True}
    output = BatchOutput(tmp_path / "out.jsonl")
    async with await Broker.open(replace(broker.config, max_request_bytes=2000)) as narrow, start_worker():
        await BatchRun(narrow, output, window=1).run([BatchLine(1, "a", "/v1/completions", body)])
        states = [job.state for job in await broker.jobs.list()]
    assert (output.failed, states) == (1, [JobState.DONE])
    output.close(finished=True)


async def test_the_clock_starts_chores_once(broker: Broker, config: Config, folder: Path) -> None:
    hourly = replace(config, control=replace(config.control, crontab=("0 * * * * retention",)))
    old = folder / "out" / "old.jsonl"
    old.write_text("")
    os.utime(old, (1.0, 1.0))
    async with running(broker, hourly) as first, running(broker, hourly) as other:
        jobs = [job for control in (first, other) for job in control.cron_jobs]
        await until(lambda: all(job.next_run is not None for job in jobs))
        due = datetime.now(tz=first.timezone) - timedelta(seconds=1)
        for job in jobs:
            job.next_run = due  # both are due at the same time, as with a real clock
        await until(lambda: not old.exists())
        await until(lambda: first.jobs_complete + other.jobs_complete == 1)
        await until(lambda: all(is_in_the_future(worker) for worker in (first, other)))
        async with asyncio.timeout(30.0):  # arq counts a job before it removes it from the queue
            while await first.pool.zcard("ktqueue:control") > 0:  # noqa: ASYNC110 # as one held for later would stay
                await asyncio.sleep(0.01)
    assert first.jobs_complete + other.jobs_complete == 1


async def test_a_control_worker_without_a_folder_leaves_files_to_others(
    broker: Broker, config: Config, folder: Path, start_worker: Any
) -> None:
    write(folder / "in" / "one.jsonl", 1)
    plain = replace(config, control=replace(config.control, batch_dir=None, crontab=("* * * * * batches",)))
    async with running(broker, plain) as control:
        assert control.cron_jobs == []
        await control.pool.enqueue_job("batch", "one.jsonl", _job_id="batch:one.jsonl")
        await until(lambda: control.jobs_retried > 0)
        async with start_worker(), running(broker, config):
            await until(lambda: (folder / "done" / "one.jsonl").exists())
