"""TLS with verified certificates, and a user with exactly the permissions that the guide lists."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import free_ports
from redis_fleet import SERVICE, ClusterFleet, Server
from teller import read
from tls_front import Authority, TlsFront

from ktqueue.broker.broker import Broker
from ktqueue.broker.keys import Keys
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", free_ports(1)[0], "appendonly yes")
    yield server
    server.kill()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def round_trip(config: BrokerConfig, card: Any, make_request: Any) -> None:
    """Call each script once, and subscribe."""
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        done, given_back, cancelled, late = [
            await broker.jobs.submit(make_request(expires_in=expires), idempotency_key=f"{config.prefix} {k}")
            for k, expires in enumerate((60, None, None, 0.001))
        ]
        await lease.beat({"rows": 1})
        assert {claim.job_id for claim in await lease.claim(2)} == {done.id, given_back.id}
        await broker.jobs.cancel(cancelled.id)
        await lease.commit([(done.id, TokenEvent(seq=1, text="a"))])
        await lease.commit([(done.id, TokenEvent(seq=2, state=JobState.DONE))])
        await broker.reaper().reap()
        assert await read(broker, done.id) == [1, 2]
        assert (await broker.jobs.get(late.id)).state is JobState.EXPIRED
        await lease.release([given_back.id])
        assert len(await broker.jobs.list()) == 4
        assert (await broker.jobs.depth())[0].interactive == 1
        assert await broker.models.cards() == [card]
        assert len(await broker.models.workers()) == 1
        await lease.close()


async def test_certificates_are_checked(
    server: Any, authority: Any, card: ModelCard, make_request: Callable[..., GenerationRequest], tmp_path: Path
) -> None:
    here = authority.certificate("127.0.0.1")
    stranger = Authority(tmp_path / "server")
    async with TlsFront(server.port, here) as front:
        url = f"rediss://127.0.0.1:{front.port}"
        await round_trip(BrokerConfig(url=f"{url}?ssl_ca_certs={authority.file}"), card, make_request)
        assert front.secure >= 2
        for wrong in (url, f"{url}?ssl_ca_certs={stranger.file}"):
            with pytest.raises(Unavailable, match="certificate verify failed"):
                await Broker.open(BrokerConfig(url=wrong))
        await (await Broker.open(BrokerConfig(url=f"{url}?ssl_cert_reqs=none"))).close()
    async with TlsFront(server.port, authority.certificate("example.org")) as front:
        url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={authority.file}"
        with pytest.raises(Unavailable, match="is not valid for"):
            await Broker.open(BrokerConfig(url=url))
        await (await Broker.open(BrokerConfig(url=f"{url}&ssl_check_hostname=false"))).close()


@pytest.mark.fleet
async def test_a_cluster_is_reached_over_tls_wherever_the_slot_is(
    authority: Any, card: ModelCard, make_request: Callable[..., GenerationRequest], tmp_path: Path
) -> None:
    fronts: list[TlsFront] = []

    def announced(port: int) -> int:
        fronts.append(TlsFront(port, authority.certificate("127.0.0.1")))
        return fronts[-1].port

    fleet = ClusterFleet(tmp_path, Keys("ktq").tag, announced=announced)
    try:
        async with contextlib.AsyncExitStack() as opened:
            for front in fronts:
                await opened.enter_async_context(front)
            url = f"{fleet.url.replace('redis', 'rediss', 1)}?ssl_ca_certs={authority.file}"
            await round_trip(BrokerConfig(url=url), card, make_request)
            source = fleet.servers.index(fleet.owner)
            target = (source + 1) % 3
            seen = fronts[target].secure
            async with await Broker.open(BrokerConfig(url=url)) as broker:
                await (await Lease.register(broker, card)).close()
                await asyncio.to_thread(fleet.move_slot, fleet.servers[target], between=lambda: None)
                job = await broker.jobs.submit(make_request())
                assert (await broker.jobs.get(job.id)).state is JobState.QUEUED
            assert fronts[target].secure > seen
            with pytest.raises(Unavailable, match="certificate verify failed"):
                await Broker.open(BrokerConfig(url=url.partition("?")[0]))
    finally:
        fleet.stop()


async def test_a_client_shows_its_certificate(
    server: Any, authority: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    certificate, key = authority.certificate("client.example")
    async with TlsFront(server.port, authority.certificate("127.0.0.1"), clients=authority) as front:
        url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={authority.file}"
        with pytest.raises(Unavailable, match="away"):
            await Broker.open(BrokerConfig(url=url))
        shown = f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}"
        await round_trip(BrokerConfig(url=shown), card, make_request)


def allowed() -> list[str]:
    """Return the permissions of the guide's user."""
    text = (ROOT / "docs" / "guides" / "redis.md").read_text()
    (block,) = re.findall(r"^user ktqueue .*\n(?:  .*\n)*", text, re.MULTILINE)
    words: list[str] = block.split()
    return words[2:]


def test_the_guides_user_may_call_exactly_what_the_scripts_call() -> None:
    called = set()
    for script in (ROOT / "ktqueue" / "broker" / "lua").glob("*.lua"):
        called |= {word.lower() for word in re.findall(r"redis\.p?call\('(\w+)'", script.read_text())}
    called |= {"info", "ping", "subscribe", "unsubscribe", "eval", "evalsha"}
    told = {word[1:].partition("|")[0] for word in allowed() if word.startswith("+")}
    assert told - called == set(), "the user of docs/guides/redis.md may do what is not needed"
    assert called - told == set(), "the user of docs/guides/redis.md may not do what is needed"


async def test_the_guides_user_is_sufficient_and_limited_to_its_prefix(
    server: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    server("ACL", "SETUSER", "ktqueue", *(word.replace("PASSWORD", "secret") for word in allowed()))
    server("ACL", "SETUSER", "default", "off")
    config = BrokerConfig(url=f"redis://ktqueue:secret@127.0.0.1:{server.port}")
    await round_trip(config, card, make_request)
    async with await Broker.open(replace(config, prefix="other", operation_timeout=1.0)) as broker:
        with pytest.raises(ConfigError, match="refuses"):
            await broker.jobs.depth()
        with pytest.raises(Unavailable, match="permissions"):
            await broker.hub.subscribe(broker.keys.wake_channel("tale"), max_bytes=1, seconds=0.5)
    for wrong in ("ktqueue:wrong", "nobody:secret"):
        with pytest.raises(ConfigError, match=f"Redis at 127.0.0.1:{server.port} refuses the user or the password"):
            await Broker.open(replace(config, url=f"redis://{wrong}@127.0.0.1:{server.port}"))


async def test_a_password_that_changes_while_a_process_works_is_an_outage(server: Any) -> None:
    server("ACL", "SETUSER", "ktqueue", *(word.replace("PASSWORD", "secret") for word in allowed()))
    config = BrokerConfig(url=f"redis://ktqueue:secret@127.0.0.1:{server.port}", connect_timeout=1.0)
    async with await Broker.open(config) as broker:
        server("ACL", "SETUSER", "ktqueue", "resetpass", ">other")
        server("CLIENT", "KILL", "USER", "ktqueue")
        with pytest.raises(Unavailable, match="refuses the user or the password"):
            await broker.jobs.depth()
        server("ACL", "SETUSER", "ktqueue", ">secret")
        assert await broker.jobs.depth() == []


async def test_a_refused_command_is_named_at_the_start(
    server: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    server("ACL", "SETUSER", "ktqueue", *(word.replace("PASSWORD", "secret") for word in allowed()), "-info")
    config = BrokerConfig(url=f"redis://ktqueue:secret@127.0.0.1:{server.port}")
    with pytest.raises(ConfigError, match="INFO"):
        await Broker.open(config)
    server("ACL", "SETUSER", "ktqueue", "+info", "+waitaof")
    await round_trip(replace(config, durability="fsync"), card, make_request)  # CONFIG is refused, so it waits
    assert server("INFO", "commandstats")["cmdstat_waitaof"]["calls"] == 5
    server("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(ConfigError, match="appendonly no"):
        await Broker.open(replace(config, durability="fsync"))


async def test_sentinels_may_have_passwords_and_tls(
    tmp_path: Path, authority: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    certificate = authority.certificate("127.0.0.1")
    server = Server(tmp_path / "server", free_ports(1)[0], "requirepass of-server", password="of-server")
    async with TlsFront(server.port, certificate) as front:
        sentinel = Server(
            tmp_path / "sentinel",
            free_ports(1)[0],
            f"sentinel monitor {SERVICE} 127.0.0.1 {front.port} 1",
            f"sentinel auth-pass {SERVICE} of-server",
            "requirepass of-sentinel",
            sentinel=True,
            password="of-sentinel",
        )
        try:
            async with TlsFront(sentinel.port, certificate) as sentinel_front:
                url = f"rediss+sentinel://:of-server@127.0.0.1:{sentinel_front.port}/{SERVICE}"
                url += f"?ssl_ca_certs={authority.file}"
                await round_trip(BrokerConfig(url=f"{url}&sentinel_password=of-sentinel"), card, make_request)
                assert front.secure > 0
                assert sentinel_front.secure > 0
                with pytest.raises(ConfigError, match="sentinels refuse"):
                    await Broker.open(BrokerConfig(url=url))
        finally:
            sentinel.kill()
            server.kill()
