"""The HTTP answer to a generating request: one JSON body, or a stream of frames. Also used to resume a stream."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar

from starlette.responses import Response

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.codec import dumps
from ktqueue.core.events import TokenEvent
from ktqueue.gateway.endpoints import endpoint_of
from ktqueue.gateway.feed import Batch
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.http.headers import StreamPlace, rate_headers
from ktqueue.gateway.http.sse import EventStream
from ktqueue.openai.choices import Choices

LARGE = 1_000  # events, and tokens with log probabilities; as JSON they take about 20 ms
Made = TypeVar("Made")


class AnswerWriter:
    """Writes the answer of one or more jobs in the form of the endpoint that they came from.

    `digest` is that of the model when they were submitted, in case that no worker has started them yet.
    """

    def __init__(self, records: Sequence[JobRecord], digest: str = "") -> None:
        first = records[0]
        generation = first.readable_request()
        self.headers = {"x-job-id": ",".join(record.id for record in records), **rate_headers(records[-1].tenant_usage)}
        endpoint = endpoint_of(generation)
        self.format = endpoint.stream_format
        self._reply = endpoint.reply_to(generation, first.id, int(first.created_at), first.digest or digest)
        self._choices = Choices(len(records), generation)

    def whole(self, events: Batch) -> bytes:
        """The JSON body made from all events of all jobs."""
        return dumps(self._reply.whole(self._choices.whole(events), self._choices.usage()))

    def frames(self, batch: Batch) -> bytes:
        """Frames for new events. Text of one choice is joined to one frame."""
        return b"".join(
            self.format.chunk(chunk, None)
            for delta in self._choices.absorb(batch)
            for chunk in self._reply.chunks(delta)
        )

    def numbered_frames(self, batch: Batch, after: StreamPlace) -> bytes:
        """Frames with ids, without those up to `after`. Of one job only.

        They are made event by event, so that every reader gets the same frames, however the events arrived.
        """
        return b"".join(self._number(batch, after))

    def usage_frames(self) -> bytes:
        """The last frames, with the token counts of all jobs."""
        return b"".join(self.format.chunk(chunk, None) for chunk in self._reply.last_chunks(self._choices.usage()))

    def _number(self, batch: Batch, after: StreamPlace) -> Iterator[bytes]:
        """The id of an event's last frame is its seq, that of an earlier frame `SEQ.PART`."""
        for place_and_event in batch:
            deltas = self._choices.absorb([place_and_event])
            chunks = [chunk for delta in deltas for chunk in self._reply.chunks(delta)]
            seq = place_and_event[1].seq
            for part, chunk in enumerate(chunks, 1):
                is_last = part == len(chunks)
                if (seq, math.inf if is_last else part) > after:
                    yield self.format.chunk(chunk, seq if is_last else f"{seq}.{part}")


async def run_in_thread_if_large(events: Sequence[TokenEvent], make: Callable[[], Made]) -> Made:
    """Call `make`, which reads `events`: in a thread if they are many, since all other requests would wait."""
    size = sum(1 + len(event.logprobs) + (len(event.prompt.logprobs) if event.prompt else 0) for event in events)
    return make() if size <= LARGE else await asyncio.to_thread(make)


async def whole_answer(follower: JobFollower, writer: AnswerWriter) -> Response:
    """The JSON body, once all jobs are done. Raises the error of a job that failed."""
    events = await follower.all()
    body = await run_in_thread_if_large([event for _, event in events], lambda: writer.whole(events))
    return Response(body, media_type="application/json", headers=writer.headers)


async def stream_answer(
    follower: JobFollower,
    writer: AnswerWriter,
    *,
    include_usage: bool,
    after: StreamPlace | None = None,
    resumed: bool = False,
) -> Response:
    """The stream of frames. With `after` they have ids, and those up to `after` are left out.

    An error among the first events is raised, so that it gets its own HTTP status. A resumed stream has it as its last
    frame, since the text before the error must come first.
    """
    first = await follower.first(raises=not resumed)
    frames = _frames(follower, writer, first, include_usage, after)
    return EventStream(frames, finished=follower.begin_stream(), headers=writer.headers, stream_format=writer.format)


async def _frames(
    follower: JobFollower, writer: AnswerWriter, first: Batch, include_usage: bool, after: StreamPlace | None
) -> AsyncGenerator[bytes, None]:
    async for batch in follower.batches(first):
        frames = writer.frames(batch) if after is None else writer.numbered_frames(batch, after)
        if frames:
            yield frames
        elif not batch:
            yield writer.format.ping
    if include_usage:
        yield writer.usage_frames()
    if writer.format.end:
        yield writer.format.end
