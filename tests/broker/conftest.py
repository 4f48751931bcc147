"""Fixtures of the broker's tests: short times, an open broker, a model card."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, SamplingParams


@pytest.fixture
def config(broker_config: BrokerConfig) -> BrokerConfig:
    """A lease of half a second."""
    return replace(broker_config, lease_seconds=0.5)


@pytest.fixture
async def broker(config: BrokerConfig) -> AsyncIterator[Broker]:
    async with await Broker.open(config) as opened:
        yield opened


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        name="tale",
        created=1,
        max_model_len=512,
        vocab_size=256,
        architecture="test",
        quantization="none",
        max_num_seqs=32,
    )


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    def make(prompt: str = "Once", *, sampling: SamplingParams | None = None, **fields: Any) -> GenerationRequest:
        return GenerationRequest(model="tale", prompt=prompt, sampling=sampling or SamplingParams(), **fields)

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Wait until an async predicate is true; fails after some seconds."""

    async def wait(predicate: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not await predicate():
            assert asyncio.get_running_loop().time() < end, "it never became true"
            await asyncio.sleep(0.01)

    return wait
