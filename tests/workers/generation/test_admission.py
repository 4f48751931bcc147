"""Tokenising in threads: large prompts leave a thread free, and texts that cannot fit are not tokenised."""

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
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.workers.generation.admission import LARGE_CHARACTERS, THREADS, AdmissionRefused, TokeniserThreads


def prompt(text: str) -> GenerationRequest:
    return GenerationRequest(model="m", prompt=text)


class Encoder:
    """Records each prompt when its turn begins. Large prompts then wait for `release`."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.release = threading.Event()

    def __call__(self, request: GenerationRequest) -> EncodedPrompt:
        assert request.prompt is not None
        self.began.append(request.prompt[:6])
        if len(request.prompt) > LARGE_CHARACTERS:
            self.release.wait(30)
        if request.prompt == "bad":
            raise InvalidRequest("no", param="prompt")
        return EncodedPrompt([1], request.prompt)


async def test_large_prompts_leave_a_thread_for_small_prompts() -> None:
    encoder = Encoder()
    tokeniser = TokeniserThreads(encoder)
    big = [
        asyncio.create_task(tokeniser.encode(f"big{n}", prompt(f"big {n} " + "x" * LARGE_CHARACTERS))) for n in range(8)
    ]
    await asyncio.sleep(0)
    for n in range(20):
        assert await tokeniser.encode("small", prompt(f"little {n}")) == EncodedPrompt([1], f"little {n}")
    with pytest.raises(AdmissionRefused, match="no"):
        await tokeniser.encode("bad", prompt("bad"))
    assert sum(text.startswith("big") for text in encoder.began) == THREADS - 1
    big[-1].cancel()  # it waits for a thread
    big[0].cancel()  # a thread tokenises it
    encoder.release.set()
    ends = await asyncio.gather(*big, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, *[EncodedPrompt] * 6, asyncio.CancelledError]
    assert [text for text in encoder.began if text.startswith("big")] == [f"big {n} " for n in range(7)]
    assert await tokeniser.encode("small", prompt("after")) == EncodedPrompt([1], "after")  # no thread was lost
    tokeniser.close()


async def test_a_long_prompt_is_overtaken_only_by_prompts_that_arrive_soon() -> None:
    """At 1,000,000 characters a second, "long" may be overtaken for a third of a second."""
    held = {name: threading.Event() for name in ("large1", "large2", "little")}
    began: list[str] = []

    def encode(request: GenerationRequest) -> EncodedPrompt:
        assert request.prompt is not None
        began.append(request.prompt.rstrip("."))
        if began[-1] in held:
            held[began[-1]].wait(30)
        return EncodedPrompt([1], request.prompt)

    tokeniser = TokeniserThreads(encode)

    async def start(name: str, characters: int) -> asyncio.Task[EncodedPrompt]:
        task = asyncio.create_task(tokeniser.encode(name, prompt(name.ljust(characters, "."))))
        await asyncio.sleep(0)
        return task

    tasks = [await start("large1", 2 * LARGE_CHARACTERS), await start("large2", 2 * LARGE_CHARACTERS)]
    tasks += [await start("little", 10), await start("long", 5 * LARGE_CHARACTERS), await start("soon", 10)]
    await asyncio.sleep(0.5)
    tasks.append(await start("late", 10))
    held["large1"].set()
    await asyncio.gather(tasks[0], *tasks[3:])
    assert sorted(began[:THREADS]) == sorted(held)
    assert began[THREADS:] == ["soon", "long", "late"]
    for event in held.values():
        event.set()
    await asyncio.gather(*tasks)
    tokeniser.close()


def test_a_text_that_cannot_fit_is_not_tokenised(model: Any) -> None:
    """Tokenising would refuse the lone surrogate at its end. The error shows that this did not happen."""
    longest = model.tokenizer.longest_token
    assert longest is not None
    surrogate = "\udc80"
    with pytest.raises(InvalidRequest, match="surrogate"):
        model.tokenizer.encode_request(prompt("x" + surrogate), max_model_len=512)
    with pytest.raises(ContextLengthExceeded) as caught:
        model.tokenizer.encode_request(prompt("x" * longest * 512 + surrogate), max_model_len=512)
    assert (caught.value.param, caught.value.limit) == ("prompt", 512)
    chat = GenerationRequest(model="m", messages=({"role": "user", "content": "é" * longest * 256 + surrogate},))
    with pytest.raises(ContextLengthExceeded) as caught:
        model.tokenizer.encode_request(chat, max_model_len=512)
    assert caught.value.param == "messages"


async def test_small_prompts_are_admitted_while_large_prompts_are_tokenised(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    over = threading.Event()

    class SlowTokenizer:
        """The model's tokenizer, which is slow with large prompts."""

        template = model.tokenizer.template

        def encode_request(self, request: GenerationRequest, **options: Any) -> EncodedPrompt:
            if request.prompt is not None and len(request.prompt) > LARGE_CHARACTERS:
                over.wait(30)
            prompt: EncodedPrompt = model.tokenizer.encode_request(request, **options)
            return prompt

        def __getattr__(self, name: str) -> Any:
            return getattr(model.tokenizer, name)

    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    async with start_worker(tokenizer=SlowTokenizer()):
        big = GenerationRequest(model="demo", prompt="Once " * LARGE_CHARACTERS, sampling=sampling)
        large = [(await broker.jobs.submit(big)).id for _ in range(4)]
        small = await broker.jobs.submit(replace(big, prompt="Once"))
        assert (await finished(small.id)).state is JobState.DONE
        over.set()
        for job_id in large:
            assert (await finished(job_id)).last.error.code == "context_length_exceeded"


async def test_a_template_that_never_ends_fails_only_its_own_job(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    class EndlessTemplate:
        """The model's tokenizer, with another chat template."""

        template = ChatTemplate("{% if forever %}" + loops + "{% endif %}{{ messages[0].content }}", {}, "test")
        encode_request = model.tokenizer.encode_request

        def __getattr__(self, name: str) -> Any:
            return getattr(model.tokenizer, name)

    talk = GenerationRequest(
        model="demo",
        messages=({"role": "user", "content": "Once"},),
        sampling=SamplingParams(max_tokens=3, ignore_eos=True),
    )
    async with start_worker(tokenizer=EndlessTemplate()):
        endless = await broker.jobs.submit(replace(talk, chat_template_kwargs={"forever": True}))
        other = await broker.jobs.submit(talk)
        assert (await finished(other.id)).state is JobState.DONE
        last = (await finished(endless.id)).last
    assert (last.state, last.error.status, last.error.param) == (JobState.FAILED, 400, "messages")
