"""`ktqueue bridge` and `ktqueue control`: run one arq worker in this process. And an example program for arq clients.

`ktqueue up --bridge` prints the example, and it can be run as printed.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ktqueue.cli.flags import CommonFlags, expand, settings
from ktqueue.core.config import Config

if TYPE_CHECKING:
    from ktqueue.broker.redis.address import Address

PASSWORD_VARIABLE = "REDIS_PASSWORD"

PROGRAM = """
import asyncio{imports}
from arq import create_pool
from arq.connections import RedisSettings
from ktqueue.arq_json import dumps, loads

async def main():
    settings = RedisSettings(
{settings}
    )
    pool = await create_pool(
        settings, default_queue_name={queue}, job_serializer=dumps, job_deserializer=loads
    )
    job = await pool.enqueue_job(
        "generate", {{"model": {model}, "prompt": "Once upon a time", "sampling": {{"max_tokens": 50}}}}
    )
    print((await job.result())["text"])

asyncio.run(main())
"""


@expand
def bridge(common: CommonFlags) -> None:
    """Serve arq clients: `enqueue_job("generate", {...})`. Ctrl-C returns their jobs to arq's queue."""
    from ktqueue.workers.arq.bridge import run

    _serve(settings(common), run)


@expand
def control(common: CommonFlags) -> None:
    """Run batches, call webhooks, and do other chores. Ctrl-C leaves the rest to the next control worker."""
    from ktqueue.workers.arq.control import run

    _serve(settings(common), run)


def _serve(config: Config, run: Callable[[Config], Awaitable[None]]) -> None:
    import asyncio

    from ktqueue.cli.connection import check_redis
    from ktqueue.core.logs import set_up_logging

    check_redis(config)
    set_up_logging(config.log)

    async def serve() -> None:
        await run(config)

    asyncio.run(serve())


def arq_example(config: Config, url: str, model: str) -> str:
    """Return the program, for the Redis at `url` and the bridge of `config`. It reads passwords but contains none.

    Raises ConfigError.
    """
    from ktqueue.broker.redis.address import read_address

    key = "bridge.redis_url" if config.bridge.redis_url else "broker.url"
    address = read_address(config.bridge.redis_url or url, None, key)
    settings, reads_environment = _settings(address, config)
    return PROGRAM.format(
        imports="\nimport os" if reads_environment else "",
        settings="\n".join(f"        {name}={value}," for name, value in settings.items()),
        queue=_text(config.bridge.queue),
        model=_text(model),
    )


def _settings(address: "Address", config: Config) -> tuple[dict[str, str], bool]:
    """Return the keywords of arq's RedisSettings as Python text, and whether they read the environment."""
    from ktqueue.broker.redis.address import DeploymentKind

    settings: dict[str, str] = {}
    endpoint = address.endpoints[0]
    if address.kind is DeploymentKind.SENTINEL:
        settings["host"] = "[" + ", ".join(f"({_text(node.host)}, {node.port})" for node in address.endpoints) + "]"
        settings["sentinel"] = "True"
        settings["sentinel_master"] = _text(address.service)
    elif endpoint.port == 0:
        settings["unix_socket_path"] = _text(endpoint.host)
    else:
        settings["host"], settings["port"] = _text(endpoint.host), str(endpoint.port)
    if address.database:
        settings["database"] = str(address.database)
    if address.tls is not None:
        settings["ssl"] = "True"
        for name, value in (("ca_certs", address.tls.ca_certs), ("certfile", address.tls.certfile)):
            if value is not None:
                settings[f"ssl_{name}"] = _text(value)
        if address.tls.keyfile is not None:
            settings["ssl_keyfile"] = _text(address.tls.keyfile)
    if address.login.username is not None:
        settings["username"] = _text(address.login.username)
    password_file = _password_file(config)
    if password_file is not None:
        settings["password"] = f"open({_text(str(password_file))}).read().strip()"
    elif address.login.password is not None:
        settings["password"] = f"os.environ[{_text(PASSWORD_VARIABLE)}]"
        return settings, True
    return settings, False


def _password_file(config: Config) -> Path | None:
    """Return the file with the password of the broker's Redis; None if it is in the URL, or if there is none."""
    if config.bridge.redis_url is not None:
        return None
    if config.broker.password_file is not None:
        return Path(config.broker.password_file).absolute()
    private = Path(config.broker.state_dir).absolute() / "password"
    url = private.with_name("url")
    if config.broker.url is None or (url.is_file() and url.read_text(encoding="utf-8").strip() == config.broker.url):
        return private
    return None


def _text(value: str) -> str:
    """Write a text as Python code, in double quotes."""
    return json.dumps(value)
