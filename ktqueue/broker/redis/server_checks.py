"""What a server must be before it gets a job: new enough, evicting nothing, no replica, as durable as asked for.

Asked of every server that the process comes to use, also after a failover.
"""

from typing import Any

from ktqueue.broker.redis.node import Node, NotPermitted, ReadOnly, ReplyError
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

LOWEST_VERSION = (6, 2)
WAITAOF_VERSION = (7, 2)  # Valkey tells it as its `redis_version` too


async def check(node: Node, config: BrokerConfig) -> bool:
    """Must a call that is to be on disk wait for it (WAITAOF)? False: the server writes before it answers, or need not.

    Raises Unavailable that says what is wrong with the server, and ConfigError where its user may not ask.
    """
    try:
        facts = await node.execute("INFO")
    except NotPermitted as error:
        raise ConfigError(f"Redis refuses INFO to the user of broker.url: {error}", param="broker.url") from error
    except ReplyError as error:
        raise Unavailable(f"Redis refuses INFO: {error}", param="broker.url") from error
    told = str(facts.get("redis_version", "0"))
    version = _numbers(told)
    if version < LOWEST_VERSION:
        raise Unavailable(f"Redis at {node.endpoint} is {told}, 6.2 is needed", limit="6.2")
    if facts.get("role") not in (None, "master"):
        master = f"{facts.get('master_host')}:{facts.get('master_port')}"
        raise ReadOnly(
            f"Redis at {node.endpoint} is a read-only replica of {master}: give the URL of the master, or of sentinels",
            param="broker.url",
            retry_after=1.0,
        )
    policy = facts.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise Unavailable(
            f"Redis at {node.endpoint} has maxmemory-policy {policy}, noeviction is needed", limit="noeviction"
        )
    return config.durability == "fsync" and await _wait_for_disk(node, facts, version)


async def _wait_for_disk(node: Node, facts: dict[str, Any], version: tuple[int, ...]) -> bool:
    if not facts.get("aof_enabled"):
        raise _not_durable(f"Redis at {node.endpoint} has appendonly no")
    try:
        reply = await node.execute("CONFIG", "GET", "appendfsync")
    except ReplyError:  # the user may not, or the host of the server has taken CONFIG away
        policy = "unknown, since CONFIG GET is refused"
    else:
        policy = reply[1].decode() if reply else "unknown"
    if policy == "always":
        return False
    if policy == "no":  # the system writes to the disk when it likes, and the server never knows
        raise _not_durable(f"Redis at {node.endpoint} has appendfsync no")
    if version < WAITAOF_VERSION:
        raise _not_durable(
            f"Redis at {node.endpoint} is {'.'.join(map(str, version))} (WAITAOF came with 7.2), "
            f"and its appendfsync is {policy}"
        )
    return True


def _not_durable(reason: str) -> ConfigError:
    return ConfigError(
        f"broker.durability fsync needs a server with appendonly yes that has appendfsync always or WAITAOF: {reason}",
        param="broker.durability",
        value="fsync",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
