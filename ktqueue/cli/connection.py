"""How a verb speaks with Redis: at the URL given, else the private server that runs on the state directory."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ktqueue.core.config import Config
from ktqueue.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker
    from ktqueue.client import SyncClient

Result = TypeVar("Result")


def ask(config: Config, question: Callable[["Broker"], Awaitable[Result]]) -> Result:
    """Open a broker, await one question put to it, close it. Raises Unavailable and what the question raises."""
    from ktqueue.broker.broker import Broker

    async def conversation() -> Result:
        async with await Broker.open(config.broker) as broker:
            return await question(broker)

    return asyncio.run(conversation())


def ask_again(
    config: Config, question: Callable[["Broker"], Awaitable[Result]], show: Callable[[Result], None], seconds: float
) -> None:
    """Put the question every so many seconds and show the answer, until Ctrl-C or until nobody reads standard output.

    Raises Unavailable and what the question raises.
    """
    from ktqueue.broker.broker import Broker

    async def conversation() -> None:
        async with await Broker.open(config.broker) as broker:
            while True:
                show(await question(broker))
                await asyncio.sleep(seconds)

    try:
        asyncio.run(conversation())
    except KeyboardInterrupt:
        pass
    except (BrokenPipeError, SystemExit):  # `ktqueue jobs list --watch 1 | head`; rich makes an exit of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def client(config: Config) -> "SyncClient":
    """A connected blocking client, to be used as a context. Raises Unavailable."""
    from ktqueue.client import SyncClient

    return SyncClient.open(config=config.broker)


def only_model(config: Config) -> str:
    """The model that the workers serve. Raises Unavailable where there is none, InvalidRequest where there are more."""

    async def question(broker: "Broker") -> list[str]:
        return [card.name for card in await broker.models.cards()]

    return one_model(ask(config, question))


def one_model(served: Sequence[str]) -> str:
    """The only model of a list. Raises Unavailable or InvalidRequest where it has none or several."""
    if not served:
        raise Unavailable("no worker serves a model yet")
    if len(served) > 1:
        raise InvalidRequest(f"choose one with --model: {', '.join(sorted(served))}", param="model")
    return served[0]
