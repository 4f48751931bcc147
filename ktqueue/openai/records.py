"""Job records and journal events as JSON of the jobs API."""

from collections.abc import Sequence

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.codec import Json
from ktqueue.core.events import PositionLogprobs, PromptPart, TokenEvent, TokenLogprob
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.openai.choices import Choices, token_text
from ktqueue.openai.endpoint import usage_json
from ktqueue.openai.errors import error_body
from ktqueue.openai.tool_calls import tool_calls_json


def record_json(record: JobRecord) -> Json:
    """A job. Times are in Unix seconds; `position` is its place in the queue, from 1. Fields that only a newer version
    could read are null or empty."""
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
        "usage": None if record.usage is None else usage_json(record.usage, timings=True),
        "error": None if record.error is None else error_body(record.error)["error"],
        "retried_as": record.retried_as,
        "events_url": f"/v1/jobs/{record.id}/events",
    }


def result_json(record: JobRecord, events: Sequence[TokenEvent]) -> list[Json]:
    """The text of each choice of a job, from all of its events."""
    choices = Choices(1, record.readable_request()).whole([(0, event) for event in events])
    return [
        {
            "index": choice.index,
            "text": choice.text,
            **({"reasoning_content": choice.reasoning} if choice.reasoning else {}),
            **({"tool_calls": tool_calls_json(choice, record.id)} if choice.tool_calls else {}),
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]


def event_json(event: TokenEvent) -> Json:
    """A journal event. Empty fields are left out, except `seq` and `index`.

    An event of a newer format has only `seq` and `format`.
    """
    if event.format is not None:
        return {"seq": event.seq, "format": event.format}
    value: Json = {"seq": event.seq, "index": event.index}
    if event.text:
        value["text"] = event.text
    if event.token_ids:
        value["token_ids"] = event.token_ids
    if event.logprobs:
        value["logprobs"] = [_position(position) for position in event.logprobs]
    if event.prompt is not None:
        value["prompt"] = _prompt(event.prompt)
    if event.finish_reason is not None:
        value["finish_reason"] = event.finish_reason
    if event.state is not None:
        value["state"] = event.state
    if event.usage is not None:
        value["usage"] = usage_json(event.usage, timings=True)
    if event.error is not None:
        value["error"] = error_body(event.error)["error"]
    return value


def _prompt(part: PromptPart) -> Json:
    value: Json = {}
    if part.token_ids:
        value["token_ids"] = part.token_ids
    if part.text:
        value["text"] = part.text
    if part.logprobs:
        value["logprobs"] = [None if entry is None else _position(entry) for entry in part.logprobs]
    return value


def _position(position: PositionLogprobs) -> Json:
    return {**_token(position.chosen), "top_logprobs": [_token(top) for top in position.top]}


def _token(token: TokenLogprob) -> Json:
    return {
        "token_id": token.token_id,
        "token": token_text(token),
        "logprob": token.logprob,
        "bytes": list(token.token_bytes),
    }
