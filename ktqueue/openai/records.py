"""Job records and journal events as JSON of the jobs API. Pure."""

from collections.abc import Sequence
from typing import Any

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.events import TokenEvent, TokenLogprob
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.openai.choices import Choices, alone
from ktqueue.openai.endpoint import usage_json
from ktqueue.openai.errors import error_body

Json = dict[str, Any]


def record_json(record: JobRecord) -> Json:
    """A job. Times in Unix seconds; `position` is its place in the queue, from 1. What only a newer version could read
    of it is null or empty."""
    return {
        "id": record.id,
        "object": "job",
        "state": record.state,
        "model": record.model,
        "digest": None if record.digest is None else record.digest[:SHORT_DIGEST],
        "job_class": record.job_class,
        "priority": record.priority,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "attempts": record.attempts,
        "worker_id": record.worker_id,
        "position": record.position,
        "user": None if record.request is None else record.request.user,
        "metadata": {} if record.request is None else dict(record.request.metadata),
        "usage": None if record.usage is None else usage_json(record.usage),
        "error": None if record.error is None else error_body(record.error)["error"],
        "retried_as": record.retried_as,
        "events_url": f"/v1/jobs/{record.id}/events",
    }


def result_json(record: JobRecord, events: Sequence[TokenEvent]) -> list[Json]:
    """What the choices of a job say after all of its events."""
    choices = Choices(1, record.readable_request().sampling.n).whole([(0, event) for event in events])
    return [{"index": one.index, "text": one.text, "finish_reason": one.finish_reason} for one in choices]


def event_json(event: TokenEvent) -> Json:
    """A journal event; fields that say nothing are left out, `seq` and `index` never. Of one that a newer version wrote
    there are `seq` and `format` alone."""
    if event.format is not None:
        return {"seq": event.seq, "format": event.format}
    value: Json = {"seq": event.seq, "index": event.index}
    if event.text:
        value["text"] = event.text
    if event.token_ids:
        value["token_ids"] = event.token_ids
    if event.logprobs:
        value["logprobs"] = [
            {**_token(one.chosen), "top_logprobs": [_token(top) for top in one.top]} for one in event.logprobs
        ]
    if event.finish_reason is not None:
        value["finish_reason"] = event.finish_reason
    if event.state is not None:
        value["state"] = event.state
    if event.usage is not None:
        value["usage"] = usage_json(event.usage)
    if event.error is not None:
        value["error"] = error_body(event.error)["error"]
    return value


def _token(one: TokenLogprob) -> Json:
    return {
        "token_id": one.token_id,
        "token": alone(one),
        "logprob": one.logprob,
        "bytes": list(one.token_bytes),
    }
