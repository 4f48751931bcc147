"""Checks a server before it gets jobs: new enough, no eviction, no replica, as durable as the settings require.

Every server that the process uses is checked, also after a failover.
"""

from typing import Any

from ktqueue.broker.redis.node import Node, NotPermitted, ReadOnly, ReplyError
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

LOWEST_VERSION = (6, 2)
WAITAOF_VERSION = (7, 2)  # Valkey reports this as its `redis_version` too


async def check(node: Node, config: BrokerConfig, *, waitaof_version: tuple[int, ...] = WAITAOF_VERSION) -> bool:
    """Check a server. Returns whether durable calls must wait for the disk (WAITAOF, from `waitaof_version` on).

    They need not if the server writes before it answers, or if the settings do not require it. Raises Unavailable with
    what is wrong with the server, or ConfigError if its user may not ask.
    """
    try:
        facts = await node.execute("INFO")
    except NotPermitted as error:
        raise ConfigError(f"Redis refuses INFO to the user of broker.url: {error}", param="broker.url") from error
    except ReplyError as error:
        raise Unavailable(f"Redis refuses INFO: {error}", param="broker.url") from error
    reported = str(facts.get("redis_version", "0"))
    version = _numbers(reported)
    if version < LOWEST_VERSION:
        raise Unavailable(f"Redis at {node.endpoint} has version {reported}, but 6.2 or newer is required", limit="6.2")
    if facts.get("role") not in (None, "master"):
        master = f"{facts.get('master_host')}:{facts.get('master_port')}"
        raise ReadOnly(
            f"Redis at {node.endpoint} is a read-only replica of {master}: use the URL of the master, or of sentinels",
            param="broker.url",
            retry_after=1.0,
        )
    policy = facts.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise Unavailable(
            f"Redis at {node.endpoint} has maxmemory-policy {policy}, but noeviction is required", limit="noeviction"
        )
    return config.durability == "fsync" and await _wait_for_disk(node, facts, version, waitaof_version)


async def _wait_for_disk(
    node: Node, facts: dict[str, Any], version: tuple[int, ...], waitaof_version: tuple[int, ...]
) -> bool:
    if not facts.get("aof_enabled"):
        raise _not_durable(f"Redis at {node.endpoint} has appendonly no")
    try:
        reply = await node.execute("CONFIG", "GET", "appendfsync")
    except ReplyError:  # the user lacks the permission, or the provider has removed CONFIG
        policy = "unknown, since CONFIG GET is refused"
    else:
        policy = reply[1].decode() if reply else "unknown"
    if policy == "always":
        return False
    if policy == "no":  # the operating system decides when to write, and the server does not know
        raise _not_durable(f"Redis at {node.endpoint} has appendfsync no")
    if version < waitaof_version:
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
