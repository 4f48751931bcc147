"""The bridge: it runs arq's `enqueue_job("generate", {...})` as a job of ours and returns its result to arq.

An arq job submits one of our jobs under its own id and waits for its end. It computes nothing, so it may die or run
twice: each run finds the same job. The module can be executed: `python -m ktqueue.workers.arq.bridge`.
"""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

import asyncio
import contextlib
import hashlib
import re
import sys
from typing import Any

from ktqueue.batches.stored.patience import Patience
from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.completion import Completion, completion_of
from ktqueue.core.config import Config
from ktqueue.core.errors import InvalidRequest, JobNotFound, JournalRegressed, KtqueueError, Unavailable
from ktqueue.core.events import TokenEvent
from ktqueue.core.request import GenerationRequest
from ktqueue.openai.endpoint import usage_json
from ktqueue.openai.jobs import parse_job
from ktqueue.workers.arq.process import execute, serve
from ktqueue.workers.arq.worker import SteadyWorker

MAX_ATTEMPTS = 3  # runs of a job whose journal is lost before the bridge has read its end
RETRY_SECONDS = 0.5  # if an error does not say when to try again

_JOB_ID = re.compile(r"[A-Za-z0-9_.:-]{1,120}")


def generation_id(arq_id: str, attempt: int = 0) -> str:
    """The id of our job: that of the arq job if its characters are allowed, else a digest of it."""
    name = arq_id if _JOB_ID.fullmatch(arq_id) else f"arq-{hashlib.sha256(arq_id.encode()).hexdigest()}"
    return f"{name}:again{attempt}" if attempt else name


class Bridge(SteadyWorker):
    """Serves `generate` on the queue `bridge.queue`."""

    def __init__(self, broker: Broker, config: Config, url: str) -> None:
        super().__init__(
            {"generate": self.generate},
            url=config.bridge.redis_url or url,
            url_key="bridge.redis_url" if config.bridge.redis_url else "broker.url",
            password_file=None if config.bridge.redis_url else config.broker.password_file,
            config=config.broker,
            queue=config.bridge.queue,
            max_jobs=config.bridge.max_jobs,
            keep_result=config.bridge.keep_result,
            poll_seconds=config.bridge.poll_seconds,
        )
        self._broker = broker
        self._tenant = config.bridge.tenant
        self._control = config.control

    async def generate(self, context: dict[str, Any], *arguments: Any, **fields: Any) -> dict[str, Any]:
        """Run a job. It takes the body of POST /v1/jobs, or the body's fields as keywords. Returns `result_json`.

        Raises the error of the submission or of the job. The error's code reaches arq's client.
        """
        body = arguments[0] if arguments else fields
        if len(arguments) > 1 or not isinstance(body, dict) or (arguments and fields):
            raise InvalidRequest("generate takes one object, the body of POST /v1/jobs, or its fields as keywords")
        arq_id = str(context["job_id"])
        card = await Patience(arq_id).call(lambda: self._broker.models.card(str(body.get("model"))))
        request = parse_job(body, card)
        if request.webhook is not None:
            request.webhook.check_allowed(self._control.webhook_secret, self._control.webhook_hosts)
        for attempt in range(MAX_ATTEMPTS):
            job_id = generation_id(arq_id, attempt)
            try:
                await self._submit(request, job_id)
                events = await self._follow(job_id)
            except asyncio.CancelledError:
                if arq_id in self.aborting_tasks:  # else this process ends, and the job continues
                    await self._cancel(job_id)
                raise
            if events and events[0].seq == 1:
                return result_json(request, completion_of(job_id, request.sampling.n, events))
        raise KtqueueError(f"the journal of job {job_id} was lost {MAX_ATTEMPTS} times")

    async def finish_failed_job(self, job_id: str, result_data: bytes | None) -> None:
        """Cancel our job if the arq job ends before a bridge runs it, for example because it was aborted."""
        with contextlib.suppress(JobNotFound):
            if (await self._broker.jobs.get(generation_id(job_id))).tenant == self._tenant:
                await self._broker.jobs.cancel(generation_id(job_id))
        await super().finish_failed_job(job_id, result_data)

    async def _submit(self, request: GenerationRequest, job_id: str) -> JobRecord:
        while True:
            call = asyncio.ensure_future(self._broker.jobs.submit(request, job_id=job_id, tenant=self._tenant))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:  # the submission must not arrive after the cancellation
                with contextlib.suppress(KtqueueError):
                    await call
                raise
            except KtqueueError as error:
                if error.status not in (429, 503):
                    raise
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)

    async def _follow(self, job_id: str) -> list[TokenEvent]:
        """Return all events of a job, up to its last. Returns none if they are lost."""
        events: list[TokenEvent] = []
        while True:
            try:
                async for event in self._broker.journal.follow(job_id, events[-1].seq if events else 0):
                    events.append(event)  # noqa: PERF401 # events received before an outage are kept
                return events
            except (JobNotFound, JournalRegressed):
                return []
            except Unavailable as error:
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)

    async def _cancel(self, job_id: str) -> None:
        with contextlib.suppress(JobNotFound):
            await Patience(job_id).call(lambda: self._broker.jobs.cancel(job_id))


def result_json(request: GenerationRequest, completion: Completion) -> dict[str, Any]:
    """The value of `Job.result()`: the first choice's text, ids and finish reason, all choices, and token counts."""
    choices: list[dict[str, Any]] = [
        {"index": index, "text": text, "token_ids": list(token_ids), "finish_reason": reason}
        for index, (text, token_ids, reason) in enumerate(
            zip(completion.texts, completion.token_ids, completion.finish_reasons, strict=True)
        )
    ]
    if request.sampling.logprobs is not None:
        for choice, positions in zip(choices, completion.logprobs, strict=True):
            choice["logprobs"] = [
                {
                    "token_id": position.chosen.token_id,
                    "logprob": position.chosen.logprob,
                    "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in position.top],
                }
                for position in positions
            ]
    first = {key: value for key, value in choices[0].items() if key in ("text", "token_ids", "finish_reason")}
    usage = None if completion.usage is None else usage_json(completion.usage)
    return {"job_id": completion.job_id, "model": request.model, **first, "choices": choices, "usage": usage}


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Waits while Redis does not answer. Raises ConfigError."""
    await serve(config, lambda broker, url: Bridge(broker, config, url))


if __name__ == "__main__":
    sys.exit(execute(run))
