"""The Python API, async and blocking, with a worker that speaks the broker's protocol and has no model."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from processes import until
from required import required

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.client import Client, SyncClient
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Cancelled, EngineFailure, InvalidRequest, JobNotFound, Unavailable
from ktqueue.core.events import FinishReason, JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
async def echo_worker(config: BrokerConfig, card: ModelCard) -> Any:
    """A worker that answers each choice with the words of the prompt, one word per event."""

    async def work(broker: Any) -> None:
        lease = await Lease.register(broker, card)
        ready.set()
        while True:
            for claim in await lease.claim(8):
                words = required(claim.request.prompt, "the prompt").split()
                events = []
                for index in range(claim.request.sampling.n):
                    events += [
                        TokenEvent(seq=0, index=index, token_ids=(k,), text=word + " ") for k, word in enumerate(words)
                    ]
                    events.append(TokenEvent(seq=0, index=index, finish_reason=FinishReason.STOP))
                usage = Usage(prompt_tokens=len(words), completion_tokens=len(words) * claim.request.sampling.n)
                if "fail" in words:
                    events = [TokenEvent(seq=0, state=JobState.FAILED, error=EngineFailure("no such word").info())]
                else:
                    events.append(TokenEvent(seq=0, state=JobState.DONE, usage=usage))
                if "wait" in words:
                    continue
                for seq, event in enumerate(events, 1):
                    await lease.commit([(claim.job_id, _numbered(event, seq))])
            for job_id in await lease.commit([]):
                await lease.commit([(job_id, TokenEvent(seq=1, state=JobState.CANCELLED, error=Cancelled("x").info()))])
            await lease.beat({})
            await lease.wait_for_work(0.05)

    ready = asyncio.Event()
    async with await Broker.open(config) as broker:
        task = asyncio.create_task(work(broker))
        await ready.wait()
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _numbered(event: Any, seq: Any) -> Any:
    return replace(event, seq=seq)


async def test_a_client_generates_streams_asks_and_cancels(config: BrokerConfig, echo_worker: Any) -> None:
    async with Client(config=config) as client:
        answer = await client.generate(model="tale", prompt="a b c", n=2, temperature=0.5)
        assert answer.texts == ("a b c ", "a b c ")
        assert answer.text == "a b c "
        assert answer.finish_reasons == (FinishReason.STOP, FinishReason.STOP)
        assert answer.token_ids == ((0, 1, 2), (0, 1, 2))
        assert answer.usage == Usage(prompt_tokens=3, completion_tokens=6)
        assert [event.seq async for event in client.stream(answer.job_id, after=5)] == [6, 7, 8, 9]
        assert (await client.status(answer.job_id)).state is JobState.DONE

        record = await client.submit(model="tale", prompt="wait")

        async def runs() -> Any:
            return (await client.status(record.id)).state is JobState.RUNNING

        await until(runs)
        await client.cancel(record.id)
        with pytest.raises(Cancelled):
            await client.result(record.id)
        with pytest.raises(EngineFailure, match="no such word"):
            await client.generate(model="tale", prompt="fail")


async def test_the_client_refuses_wrong_requests(
    config: BrokerConfig, echo_worker: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    async with Client(config=config) as client:
        with pytest.raises(InvalidRequest, match="temperature"):
            await client.submit(model="tale", prompt="a", temperature=-1)
        with pytest.raises(TypeError, match="colour"):
            await client.submit(model="tale", prompt="a", colour="red")
        with pytest.raises(TypeError, match="not both"):
            await client.submit(make_request(), temperature=1)
        with pytest.raises(JobNotFound):
            await client.result("job-of-nobody")
    with pytest.raises(Unavailable):
        await client.submit(model="tale", prompt="a")


async def test_the_blocking_client(config: BrokerConfig, echo_worker: Any) -> None:
    def use() -> None:
        with SyncClient(config=config) as client:
            record = client.submit(model="tale", prompt="a b", job_id="mine", stop=["."])
            assert record.id == "mine"
            assert record.readable_request().sampling.stop == (".",)
            assert [event.text for event in client.stream("mine")][:2] == ["a ", "b "]
            assert client.result("mine").text == "a b "
            assert client.generate(model="tale", prompt="x").text == "x "
            assert client.status("mine").state is JobState.DONE
            assert client.cancel("mine").state is JobState.DONE
            stream = client.stream("mine")
            next(stream)
            stream.close()
        client.close()

    await asyncio.to_thread(use)


class Interruption:
    """Raises KeyboardInterrupt in a block, at one of the moments when Python looks for signals: the nth call or return.

    A real signal comes at any of them, so a test that sends one meets the rare moments rarely.
    """

    def __init__(self, moment: int) -> None:
        self._countdown = moment
        self.came = False

    def __enter__(self) -> "Interruption":
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _notice(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self._countdown -= 1
            if self._countdown == 0:
                sys.setprofile(None)
                self.came = True
                raise KeyboardInterrupt


async def test_no_moment_of_the_blocking_client_loses_ctrl_c(config: BrokerConfig, echo_worker: Any) -> None:
    def interrupted(client: SyncClient, moment: int) -> bool:
        arrived = False
        with Interruption(moment) as interruption:
            try:
                job = client.submit(model="tale", prompt="a b")
                for _ in client.stream(job.id):
                    pass
            except KeyboardInterrupt:
                arrived = True
        assert arrived == interruption.came
        assert client.generate(model="tale", prompt="x").text == "x "
        return arrived

    def use() -> None:
        try:
            with SyncClient(config=config) as client:
                moments.extend(itertools.takewhile(lambda moment: interrupted(client, moment), itertools.count(1)))
        finally:
            loop.call_soon_threadsafe(ended.set)

    moments: list[int] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=use, daemon=True).start()  # a daemon, so that a call that hangs does not keep the run alive
    await ended.wait()
    assert len(moments) > 50


def test_a_blocking_client_without_a_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="away"):
        SyncClient(f"unix://{tmp_path}/nothing.sock")


async def test_closing_ends_the_calls_of_other_threads(config: BrokerConfig, echo_worker: Any) -> None:
    client = await asyncio.to_thread(SyncClient, config=config)
    job = await asyncio.to_thread(client.submit, model="tale", prompt="wait")
    events = client.stream(job.id)
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(asyncio.to_thread(client.result, job.id)) for _ in range(2)]
    waiting.append(asyncio.create_task(asyncio.to_thread(lambda: next(events))))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(10):
        await asyncio.to_thread(client.close)
        for call in waiting:
            with pytest.raises(Unavailable, match="closed"):
                await call
    with pytest.raises(Unavailable, match="closed"):
        client.status(job.id)
    client.close()


async def test_a_result_is_waited_for_while_redis_is_away(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], tmp_path: Path
) -> None:
    server = PrivateServer()
    url = await asyncio.to_thread(server.start, tmp_path)
    try:
        async with (
            Client(config=replace(config, url=url, connect_timeout=0.2)) as client,
            await Broker.open(replace(config, url=url)) as broker,
        ):
            lease = await Lease.register(broker, card)
            job = await client.submit(make_request())
            await lease.claim(1)
            await asyncio.to_thread(server.stop)
            waiting = asyncio.create_task(client.result(job.id))
            await asyncio.sleep(1)
            assert await asyncio.to_thread(server.start, tmp_path) == url
            await lease.commit(
                [(job.id, TokenEvent(seq=1, state=JobState.DONE, usage=Usage(prompt_tokens=1, completion_tokens=0)))]
            )
            assert (await waiting).job_id == job.id
    finally:
        await asyncio.to_thread(server.stop)
