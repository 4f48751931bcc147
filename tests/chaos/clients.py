"""The clients of the kill loop: they submit, read, leave, come back and cancel. A seed decides their habits."""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from ktqueue.broker.broker import Broker
from ktqueue.core.errors import JobNotFound, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from tests.chaos.reader import FixedRequest, JobOutcome, ReaderView, Reference, judge

HABITS = {"reads": 40, "comes and goes": 30, "cancels": 15, "looks later": 15}
AGAIN_SECONDS = 0.1  # until a client repeats a request that failed
PATIENCE = 90.0  # seconds without any progress after which a job counts as lost
TERMINAL = {state.value for state in JobState if state.terminal}

log = logging.getLogger(__name__)


class LostJob(Exception):
    """An acknowledged job is missing, or makes no progress."""


class Clients:
    """All clients. Call `run`, then `stop`; `jobs` and `faults` say what happened. A client has one job at a time."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker, seed: int, shortest: int, longest: int) -> None:
        self._http = http
        self._broker = broker
        self._seed = seed
        self._tokens = (shortest, longest)
        self._over = asyncio.Event()
        self.reference: Reference = {}
        self.jobs: dict[str, JobOutcome] = {}
        self.habits: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.connections = 0
        self.tokens = 0

    async def undisturbed(self, requests: Sequence[FixedRequest]) -> None:
        """Run each request once before anything is killed, with as many tokens as the longest job has."""
        longest = self._tokens[1]

        async def run_once(request: FixedRequest, number: int) -> list[list[int]]:
            job_id = await self._submit(request.body(longest), f"reference-{self._seed}-{number}")
            view = await self._whole(job_id, ReaderView())
            ids: list[list[int]] = [[] for _ in range(request.choices)]
            for event in view.events:
                ids[event["index"]] += event.get("token_ids", [])
            assert all(len(choice) == longest for choice in ids), "the reference run was disturbed"
            return ids

        answers: list[list[list[int]]] = []
        for start in range(0, len(requests), 8):
            part = requests[start : start + 8]
            answers += await asyncio.gather(*(run_once(request, start + i) for i, request in enumerate(part)))
        self.reference = dict(zip(requests, answers, strict=True))

    async def run(self, clients: int) -> None:
        """Run the clients until `stop` is called and their current jobs have ended."""
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    def stop(self) -> None:
        """Let no client begin another job."""
        self._over.set()

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed} client {number}")
        requests, turn = list(self.reference), 0
        while not self._over.is_set():
            habit = draw.choices(list(HABITS), list(HABITS.values()))[0]
            request, tokens = draw.choice(requests), draw.randint(*self._tokens)
            job_class = draw.choice(["interactive", "interactive", "batch"])
            job_id = await self._submit(request.body(tokens, job_class), f"{self._seed}-{number}-{turn}")
            turn += 1
            outcome = self.jobs[job_id] = JobOutcome(job_id, request, tokens, job_class)
            self.habits[habit] += 1
            try:
                await getattr(self, f"_{habit.replace(' ', '_')}")(outcome, draw)
                await self._check(outcome)
            except LostJob as lost:
                log.error("%s", lost)
                self.faults["lost jobs"] += 1

    # Habits

    async def _reads(self, outcome: JobOutcome, draw: random.Random) -> None:
        outcome.view = await self._whole(outcome.job_id, ReaderView())

    async def _comes_and_goes(self, outcome: JobOutcome, draw: random.Random) -> None:
        view = outcome.view = ReaderView()
        while view.state is None:
            await self._read(outcome.job_id, view, leave_after=draw.randint(1, 40))
            await asyncio.sleep(draw.random() * 0.3)

    async def _cancels(self, outcome: JobOutcome, draw: random.Random) -> None:
        view = outcome.view = ReaderView()
        await self._read(outcome.job_id, view, leave_after=draw.randint(1, max(1, outcome.tokens // 2)))
        while True:
            answer = await self._ask("DELETE", f"/v1/jobs/{outcome.job_id}")
            if answer is not None:
                break
        if answer.status_code == 200:
            outcome.tail_at_cancel = max((event.seq for event in await self._journal(outcome.job_id)), default=0)
        elif answer.status_code != 409:
            raise LostJob(f"DELETE {outcome.job_id}: {answer.status_code} {answer.text}")
        await self._whole(outcome.job_id, view)

    async def _looks_later(self, outcome: JobOutcome, draw: random.Random) -> None:
        await self._ended(outcome)

    # Requests

    async def _submit(self, body: dict[str, Any], key: str) -> str:
        """Submit until the job is acknowledged. The idempotency key makes one job of all attempts."""
        while True:
            answer = await self._ask("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key})
            if answer is not None:
                assert answer.status_code == 202, answer.text
                return str(answer.json()["id"])

    async def _whole(self, job_id: str, view: ReaderView) -> ReaderView:
        """Read to the end of the job, over as many connections as that takes."""
        while view.state is None:
            before = view.last_seq
            await self._read(job_id, view)
            if view.state is None and view.last_seq == before:
                await asyncio.sleep(AGAIN_SECONDS)
        return view

    async def _read(self, job_id: str, view: ReaderView, leave_after: int | None = None) -> None:
        """Read over one connection: to its end, to the end of the job, or for `leave_after` events."""
        headers = {"Last-Event-ID": str(view.last_seq)} if view.events else {}
        self.connections += 1
        here, seen = self.connections, 0
        try:
            async with (
                asyncio.timeout(PATIENCE),
                self._http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer,
            ):
                if answer.status_code == 404:
                    raise LostJob(f"{job_id} is not known")
                if answer.status_code != 200:  # 204: no event will follow
                    return
                async for line in answer.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line[6:])
                    if "seq" not in event:
                        if event["error"]["code"] != "unavailable":
                            self.faults[f"streams ended by {event['error']['code']}"] += 1
                        return
                    view.add(event, time.monotonic(), here)
                    seen += 1
                    if seen == leave_after:
                        return
        except httpx.TransportError:
            await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError:
            raise LostJob(f"{job_id} makes no progress after event {view.last_seq}") from None

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Send one request. Returns None, after AGAIN_SECONDS, if it must be repeated."""
        try:
            answer = await self._http.request(method, path, **options)
        except httpx.TransportError:
            await asyncio.sleep(AGAIN_SECONDS)
            return None
        if answer.status_code in (429, 503):
            await asyncio.sleep(AGAIN_SECONDS)
            return None
        return answer

    # Checks

    async def _ended(self, outcome: JobOutcome) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = await self._ask("GET", f"/v1/jobs/{outcome.job_id}")
            if answer is not None and answer.status_code == 404:
                raise LostJob(f"{outcome.job_id} is not known")
            if answer is not None and answer.json()["state"] in TERMINAL:
                outcome.state = answer.json()["state"]
                return
            await asyncio.sleep(AGAIN_SECONDS)
        raise LostJob(f"{outcome.job_id} does not end")

    async def _check(self, outcome: JobOutcome) -> None:
        await self._ended(outcome)
        journal = await self._journal(outcome.job_id)
        faults = judge(outcome, journal, self.reference[outcome.request])
        if faults:
            log.error("%s (%s, %d tokens): %s", outcome.job_id, outcome.request, outcome.tokens, dict(faults))
        self.faults += faults
        self.tokens += sum(len(event.token_ids) for event in journal)

    async def _journal(self, job_id: str) -> list[TokenEvent]:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return await self._broker.journal.replay(job_id)
            except JobNotFound as error:
                raise LostJob(str(error)) from error
            except Unavailable:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
