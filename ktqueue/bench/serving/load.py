"""Sends the requests of a run at their moments, or as earlier ones end, and measures the answers."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from ktqueue.bench.serving.answer import RequestForm, StreamedAnswer, refusal
from ktqueue.bench.serving.figures import Figures
from ktqueue.bench.serving.http_client import HttpClient, RequestFailure
from ktqueue.bench.serving.workload import PlannedRequest
from ktqueue.core.codec import CodecError, loads

MAX_REPLY_BYTES = 8 << 20


@dataclass(frozen=True)
class Target:
    """A server: how it is reached, at which path, and the form of its requests."""

    client: HttpClient
    endpoint: str
    form: RequestForm

    async def stream(self, request: PlannedRequest) -> StreamedAnswer:
        """Send a request and read its answer to the end. Raises RequestFailure."""
        body = self.form.body(request.prompt, request.max_tokens)
        answer = StreamedAnswer(perf_counter())
        await self.client.request("POST", self.endpoint, body, answer.receive)
        answer.check()
        return answer

    async def prompt_tokens(self, prompt: str) -> int | None:
        """Ask for the number of tokens of a prompt; None if the server does not tell. Raises RequestFailure."""
        status, body = await fetch(self.client, "POST", self.endpoint, self.form.body(prompt, 1, stream=False))
        if status != 200:
            raise refusal(status, body)
        try:
            tokens = loads(body)["usage"]["prompt_tokens"]
        except (CodecError, KeyError, TypeError):
            return None
        return tokens if isinstance(tokens, int) and tokens > 0 else None


async def fetch(client: HttpClient, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Read a whole answer. Returns its status and body. Raises RequestFailure."""
    status, parts = 0, bytearray()

    def receive(answer_status: int, piece: bytes) -> bool:
        nonlocal status
        status = answer_status
        parts.extend(piece)
        if len(parts) > MAX_REPLY_BYTES:
            raise RequestFailure("too long", f"{path} has more than {MAX_REPLY_BYTES:,} bytes")
        return False

    await client.request(method, path, body, receive)
    return status, bytes(parts)


async def warm_up(target: Target, requests: Iterator[PlannedRequest], max_concurrency: int) -> None:
    """Send requests that do not count. Raises the RequestFailure of the first that fails."""
    running: set[asyncio.Task[StreamedAnswer]] = set()
    try:
        for request in requests:
            running.add(asyncio.create_task(target.stream(request)))
            if len(running) >= max_concurrency:
                running = await _first_ended(running)
        while running:
            running = await _first_ended(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _first_ended(running: set[asyncio.Task[StreamedAnswer]]) -> set[asyncio.Task[StreamedAnswer]]:
    """Wait until a request ends. Returns those that still run; raises what an ended one raised."""
    ended, still = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    running -= ended
    for task in ended:
        task.result()
    return still


async def run_load(
    target: Target,
    requests: Iterator[PlannedRequest],
    figures: Figures,
    *,
    max_concurrency: int | None = None,
    progress: Callable[[Figures], None] = lambda figures: None,
) -> None:
    """Send all requests and count their answers in `figures`, also if the run is cancelled.

    A request is sent at its moment, or as soon as fewer than `max_concurrency` are running.
    """
    began, cpu_began = perf_counter(), time.process_time()
    slots = asyncio.Semaphore(max_concurrency or sys.maxsize)

    async def send(request: PlannedRequest) -> None:
        waited = perf_counter() - began - request.at
        figures.begin()
        try:
            answer = await target.stream(request)
        except RequestFailure as failure:
            figures.fail(failure)
        except asyncio.CancelledError:
            figures.interrupt()
            raise
        else:
            figures.complete(answer, request.prompt_tokens, waited, began)
        finally:
            slots.release()
            _note_time(figures, began, cpu_began)
            progress(figures)

    try:
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                early = began + request.at - perf_counter()
                # Without a pause, this loop would send everything before it reads an answer.
                await asyncio.sleep(max(0.0, early))
                await slots.acquire()
                tasks.create_task(send(request))
    finally:
        _note_time(figures, began, cpu_began)


def _note_time(figures: Figures, began: float, cpu_began: float) -> None:
    figures.seconds = perf_counter() - began
    figures.cpu_seconds = time.process_time() - cpu_began
