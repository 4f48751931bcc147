"""Tokenising off the loop: large prompts leave a thread to the others, and what cannot fit is not tokenised."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.core.errors import ContextLengthExceeded, InvalidRequest
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.loading.tokenizer.chat_template import ChatTemplate
from ktqueue.workers.generation.admission import LARGE_CHARACTERS, THREADS, AdmissionRefused, TokeniserThreads


def prompt(text: str) -> GenerationRequest:
    return GenerationRequest(model="m", prompt=text)


class Encoder:
    """Large prompts take until `let_go`; all are noted as they begin."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.let_go = threading.Event()

    def __call__(self, request: GenerationRequest) -> list[int]:
        assert request.prompt is not None
        self.began.append(request.prompt[:6])
        if len(request.prompt) > LARGE_CHARACTERS:
            self.let_go.wait(30)
        if request.prompt == "bad":
            raise InvalidRequest("no", param="prompt")
        return [1]


async def test_large_prompts_leave_a_thread_to_the_others() -> None:
    encoder = Encoder()
    tokeniser = TokeniserThreads(encoder)
    big = [
        asyncio.create_task(tokeniser.encode(f"big{n}", prompt(f"big {n} " + "x" * LARGE_CHARACTERS))) for n in range(8)
    ]
    await asyncio.sleep(0)
    for n in range(20):
        assert await tokeniser.encode("small", prompt(f"little {n}")) == [1]
    with pytest.raises(AdmissionRefused, match="no"):
        await tokeniser.encode("bad", prompt("bad"))
    assert sum(one.startswith("big") for one in encoder.began) == THREADS - 1
    big[-1].cancel()  # it waits
    big[0].cancel()  # its thread is at it
    encoder.let_go.set()
    ends = await asyncio.gather(*big, return_exceptions=True)
    assert [type(one) for one in ends] == [asyncio.CancelledError, *[list] * 6, asyncio.CancelledError]
    assert [one for one in encoder.began if one.startswith("big")] == [f"big {n} " for n in range(7)]
    assert await tokeniser.encode("small", prompt("after")) == [1]  # no thread was lost
    tokeniser.close()


async def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    encoder = Encoder()
    tokeniser = TokeniserThreads(encoder)
    tasks = [
        asyncio.create_task(tokeniser.encode("big", prompt(f"big {n} " + "x" * 5 * LARGE_CHARACTERS))) for n in range(3)
    ]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    ranks = [rank for rank, *_ in tokeniser._waiting]
    assert len(ranks) == 1
    assert 0 < ranks[0] - loop.time() < 1  # seconds, after which whoever comes is behind it
    encoder.let_go.set()
    await asyncio.gather(*tasks)
    tokeniser.close()


def test_a_text_that_cannot_fit_is_not_tokenised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenised")

    longest = model.tokenizer.longest_token
    assert longest is not None
    monkeypatch.setattr(model.tokenizer, "encode", never)
    with pytest.raises(ContextLengthExceeded) as caught:
        model.tokenizer.encode_request(prompt("x" * longest * 512), max_model_len=512)
    assert (caught.value.param, caught.value.limit) == ("prompt", 512)
    chat = GenerationRequest(model="m", messages=({"role": "user", "content": "é" * longest * 256},))
    with pytest.raises(ContextLengthExceeded) as caught:
        model.tokenizer.encode_request(chat, max_model_len=512)
    assert caught.value.param == "messages"


async def test_others_are_admitted_while_large_prompts_are_tokenised(
    model: Any, broker: Broker, start_worker: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    encode = model.tokenizer.encode_request

    def slowly(request: GenerationRequest, **options: Any) -> list[int]:
        if request.prompt is not None and len(request.prompt) > LARGE_CHARACTERS:
            over.wait(30)
        return list(encode(request, **options))

    monkeypatch.setattr(model.tokenizer, "encode_request", slowly)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    async with start_worker():
        big = GenerationRequest(model="demo", prompt="Once " * LARGE_CHARACTERS, sampling=sampling)
        large = [(await broker.jobs.submit(big)).id for _ in range(4)]
        small = await broker.jobs.submit(replace(big, prompt="Once"))
        assert (await finished(small.id)).state is JobState.DONE
        over.set()
        for one in large:
            assert (await finished(one)).last.error.code == "context_length_exceeded"


async def test_a_template_that_never_ends_refuses_its_own_job(
    model: Any, broker: Broker, start_worker: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if forever %}" + loops + "{% endif %}{{ messages[0].content }}", {}, "test")
    monkeypatch.setattr(model.tokenizer, "_template", template)
    talk = GenerationRequest(
        model="demo",
        messages=({"role": "user", "content": "Once"},),
        sampling=SamplingParams(max_tokens=3, ignore_eos=True),
    )
    async with start_worker():
        endless = await broker.jobs.submit(replace(talk, chat_template_kwargs={"forever": True}))
        other = await broker.jobs.submit(talk)
        assert (await finished(other.id)).state is JobState.DONE
        last = (await finished(endless.id)).last
    assert (last.state, last.error.status, last.error.param) == (JobState.FAILED, 400, "messages")
