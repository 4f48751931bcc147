"""How a command connects to Redis: to the configured URL, else to the private server of the state folder."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ktqueue.core.config import Config
from ktqueue.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker
    from ktqueue.client import SyncClient

Result = TypeVar("Result")


def ask(config: Config, question: Callable[["Broker"], Awaitable[Result]]) -> Result:
    """Open a broker, await `question(broker)`, close it. Raises Unavailable, and what the question raises."""
    from ktqueue.broker.broker import Broker

    async def conversation() -> Result:
        async with await Broker.open(config.broker) as broker:
            return await question(broker)

    return asyncio.run(conversation())


def check_redis(config: Config) -> None:
    """Check that Redis answers, before anything slow begins. Raises Unavailable, ConfigError."""
    ask(config, lambda broker: broker.models.cards())


def ask_again(
    config: Config, question: Callable[["Broker"], Awaitable[Result]], show: Callable[[Result], None], seconds: float
) -> None:
    """Ask the question every `seconds` and show each answer, until Ctrl-C or until standard output is closed.

    Raises Unavailable, and what the question raises.
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
    except (BrokenPipeError, SystemExit):  # `ktqueue jobs list --watch 1 | head`; rich turns it into an exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail


def client(config: Config) -> "SyncClient":
    """Connect a blocking client; use it as a context manager. Raises Unavailable."""
    from ktqueue.client import SyncClient

    return SyncClient.open(config=config.broker)


def only_model(config: Config) -> str:
    """Return the only served model. Raises Unavailable if there is none, InvalidRequest if there are several."""
    return one_model(ask(config, lambda broker: broker.models.names()))


def listed_models(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names in `data` of /v1/models, without aliases: those with the root of an earlier one.

    Raises KeyError or TypeError for anything else.
    """
    names: dict[str, str] = {}
    for model in models:
        name = str(model["id"])
        names.setdefault(str(model.get("root") or name), name)
    return list(names.values())


def one_model(served: Sequence[str]) -> str:
    """Return the only model of a list. Raises Unavailable if it is empty, InvalidRequest if it has several."""
    if not served:
        raise Unavailable("no worker serves a model yet")
    if len(served) > 1:
        raise InvalidRequest(f"choose one with --model: {', '.join(sorted(served))}", param="model")
    return served[0]
