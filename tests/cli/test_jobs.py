"""`submit` and `jobs` against a real stack."""

import asyncio
import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from command_line import Run, Stack, Start

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.client import SyncClient
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import EngineFailure, KtqueueError, PoisonJob
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.request import DROPPED, GenerationRequest


def test_a_prompt_is_answered_on_standard_output(ktqueue: Run, stack: Stack) -> None:
    done = ktqueue("submit", "Tell me a story about a crow.", "--max-tokens", 12, "--temperature", 0, *stack.flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 10
    assert done.stderr == ""
    again = ktqueue(
        "submit", "-", "--max-tokens", 12, "--temperature", 0, *stack.flags, stdin="Tell me a story about a crow."
    )
    assert again.stdout == done.stdout


def test_json_has_choices_usage_and_state(ktqueue: Run, stack: Stack) -> None:
    messages = json.dumps([{"role": "user", "content": "Tell me a story."}])
    words = ("submit", "--messages", "-", "-n", 2, "--max-tokens", 5, "--seed", 3, "--json", "--class", "batch")
    answer = json.loads(ktqueue(*words, *stack.flags, stdin=messages).stdout)
    assert answer["state"] == "done"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 10


def test_streamed_json_has_an_event_on_each_line(ktqueue: Run, stack: Stack) -> None:
    words = ("submit", "Once upon", "--completion", "--max-tokens", 6, "--temperature", 0, *stack.flags)
    events = [json.loads(line) for line in ktqueue(*words, "--stream", "--json").stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["state"] == "done"
    assert "".join(event.get("text", "") for event in events) == ktqueue(*words).stdout.removesuffix("\n")


def test_a_job_continues_without_its_client(ktqueue: Run, stack: Stack) -> None:
    submitted = ktqueue("submit", "hello", "--max-tokens", 8, "-d", "--job-id", "cli-mine", *stack.flags)
    assert submitted.stdout == "cli-mine\n"
    followed = ktqueue("jobs", "follow", "cli-mine", *stack.flags)
    assert followed.returncode == 0, followed.stderr
    events = [
        json.loads(line)
        for line in ktqueue("jobs", "follow", "cli-mine", "--after", "3", "--json", *stack.flags).stdout.splitlines()
    ]
    assert events[0]["seq"] == 4
    shown = json.loads(ktqueue("jobs", "show", "cli-mine", "--json", *stack.flags).stdout)
    assert (shown["state"], shown["usage"]["completion_tokens"]) == ("done", 8)
    assert shown["request"]["messages"] == [{"role": "user", "content": DROPPED}]
    table = ktqueue("jobs", "show", "cli-mine", *stack.flags).stdout
    assert "request.sampling.max_tokens" in table
    listed = ktqueue("jobs", "list", "--state", "done", *stack.flags).stdout
    assert "cli-mine" in listed
    assert "\033" not in table + listed
    for words, found in (
        (("--class", "interactive", "--model", "demo", "--tenant", "default"), True),
        (("--class", "batch"), False),
    ):
        assert ("cli-mine" in ktqueue("jobs", "list", *words, *stack.flags).stdout) == found


def test_a_watched_listing_ends_with_ctrl_c(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    process = start("jobs", "list", "--watch", 0.1, "--json", "--limit", 3, *stack.flags, cwd=tmp_path)
    assert isinstance(json.loads(process.stdout.readline()), list)
    submitted = ktqueue("submit", "hello", "--max-tokens", 2, "--job-id", "cli-watched", *stack.flags)
    assert submitted.returncode == 0, submitted.stderr
    for line in process.stdout:
        if [(job["id"], job["state"]) for job in json.loads(line)[:1]] == [("cli-watched", "done")]:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    tables = start("jobs", "list", "--watch", 0.1, *stack.flags, cwd=tmp_path)
    for _ in range(2):
        while "cli-watched" not in (line := tables.stdout.readline()):
            assert line
    tables.stdout.close()
    assert tables.wait(timeout=30) == 0
    assert tables.stderr.read() == ""
    tables.stderr.close()


def test_a_priority_reaches_the_queue(ktqueue: Run, stack: Stack) -> None:
    words = ("--max-tokens", 2, "--job-id", "cli-first", "--priority", -7)
    done = ktqueue("submit", "hello", *words, *stack.flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(ktqueue("jobs", "show", "cli-first", "--json", *stack.flags).stdout)["request"]["priority"] == -7
    refused = ktqueue("submit", "hello", "--priority", 101, *stack.flags)
    assert refused.returncode == 2
    assert "priority" in refused.stderr
    assert "100" in refused.stderr


def test_cancel_ends_a_running_job(ktqueue: Run, stack: Stack) -> None:
    words = ("submit", "hello", "--max-tokens", 3000, "-n", 32, "-d", "--job-id", "cli-long", *stack.flags)
    assert ktqueue(*words).returncode == 0
    cancelled = ktqueue("jobs", "cancel", "cli-long", "cli-nobody", *stack.flags)
    assert cancelled.returncode == 1
    assert "cli-long" in cancelled.stdout
    assert "no job 'cli-nobody'" in cancelled.stderr
    followed = ktqueue("jobs", "follow", "cli-long", *stack.flags)
    assert followed.returncode == 1
    assert "cancelled" in followed.stderr
    assert json.loads(ktqueue("jobs", "show", "cli-long", "--json", *stack.flags).stdout)["state"] == "cancelled"


def test_ctrl_c_cancels_the_job_that_submit_waits_for(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    # At such a temperature 32 stories take minutes. A single one would end by itself within a second.
    long = ("--max-tokens", 3000, "-n", 32, "--temperature", 2)
    words = ("submit", "hello", *long, "--job-id", "cli-stopped", "--stream", "--json", *stack.flags)
    process = start(*words, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert err == "cancelled cli-stopped\n"
    deadline = time.monotonic() + 10
    while json.loads(ktqueue("jobs", "show", "cli-stopped", "--json", *stack.flags).stdout)["state"] != "cancelled":
        assert time.monotonic() < deadline


def test_a_wrong_model_and_a_failed_job_are_errors(ktqueue: Run, stack: Stack) -> None:
    done = ktqueue("submit", "hello", "--model", "gpt-9", *stack.flags)
    assert done.returncode == 1
    assert done.stderr == "ktqueue: no worker serves the model 'gpt-9'; served: demo\n"
    done = ktqueue("submit", "x " * 9000, *stack.flags)
    assert done.returncode == 1
    assert "context length" in done.stderr


def test_an_unknown_job_is_an_error(ktqueue: Run, stack: Stack) -> None:
    for verb in ("show", "follow"):
        done = ktqueue("jobs", verb, "cli-nobody", *stack.flags)
        assert done.returncode == 1
        assert done.stderr.startswith("ktqueue: no job 'cli-nobody'")


def test_a_closed_pipe_cancels_the_job_without_a_traceback(
    ktqueue: Run, start: Start, stack: Stack, tmp_path: Path
) -> None:
    long = (
        "-n",
        16,
        "--max-tokens",
        4000,
        "--temperature",
        2,
        "--stream",
        "--json",
    )  # still running when the pipe is closed
    words = ("submit", "hello", *long, "--job-id", "cli-piped", *stack.flags)
    process = start(*words, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.read(3)
    process.stdout.close()
    process.wait(timeout=30)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert json.loads(ktqueue("jobs", "show", "cli-piped", "--json", *stack.flags).stdout)["state"] != "done"


def test_failed_jobs_are_submitted_again(ktqueue: Run, stack: Stack) -> None:
    usual = BrokerConfig(state_dir=str(stack.state_dir))
    config = replace(usual, prefix="retried")  # so that no other worker serves the model

    def retry(*words: str) -> subprocess.CompletedProcess[str]:
        return ktqueue("jobs", "retry", *words, *stack.flags, env={"KTQUEUE_BROKER_PREFIX": "retried"})

    async def fail(errors: dict[str, KtqueueError]) -> None:
        async with await Broker.open(usual) as broker:
            (card,) = await broker.models.cards()
        async with await Broker.open(config) as broker:
            lease = await Lease.register(broker, replace(card, name="broken"))
            for job_id, error in errors.items():
                await broker.jobs.submit(GenerationRequest(model="broken", prompt="hello"), job_id=job_id)
                await lease.claim(1)
                await lease.commit([(job_id, TokenEvent(seq=1, state=JobState.FAILED, error=error.info()))])
            await lease.close()

    asyncio.run(fail({"cli-f1": PoisonJob("x"), "cli-f2": EngineFailure("x"), "cli-f3": EngineFailure("x")}))
    retried = retry("cli-f1", "cli-nobody")
    assert retried.returncode == 1
    assert retried.stdout.startswith("cli-f1 -> cli-f1-r2 queued")
    assert "no job 'cli-nobody'" in retried.stderr
    asked = retry("--error", "engine_failure")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    many = json.loads(retry("--error", "engine_failure", "--yes", "--json").stdout)
    assert {record["retry_of"]: record["id"] for record in many} == {"cli-f2": "cli-f2-r2", "cli-f3": "cli-f3-r2"}
    none = retry("--error", "engine_failure")
    reason = "no failed jobs with the code engine_failure to send again\n"
    assert (none.returncode, none.stdout, none.stderr) == (0, "", reason)
    with SyncClient.open(config=config) as client:
        for k in range(1, 4):
            client.cancel(f"cli-f{k}-r2")
