"""Webhooks from a real control worker to a real receiver: signatures, retries, kills and forbidden addresses."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from processes import free_ports, until
from redis_fleet import Server
from tls_front import Authority

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.broker.lease import Lease
from ktqueue.core.config import Config, ControlConfig, config_environment
from ktqueue.core.errors import ConfigError
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.core.webhook import Webhook, is_public
from ktqueue.workers.arq.control import ControlWorker
from ktqueue.workers.arq.webhooks import Undeliverable, Undelivered, deliver, key_of, signed_headers

ROOT = Path(__file__).resolve().parents[3]
SECRET = "whsec_" + base64.b64encode(b"a key of twenty-four bytes").decode()


class Receiver:
    """An HTTP server that records requests. It gives `answers` in turn and repeats the last; None means no answer.

    With `certificate` and its key, which are files, it uses TLS.
    """

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        self.answers: list[int | None] = [200]
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                receiver.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
                if answer is None:
                    receiver.over.wait()
                    return
                self.send_response(answer)
                if answer == 302:
                    self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                receiver.got.append(({}, b"a redirect was followed"))
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.port = self._server.server_port
        self.url = f"{'http' if certificate is None else 'https'}://localhost:{self.port}/hook"

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()


@pytest.fixture
def config(broker: Broker, receiver: Receiver) -> Config:
    control = ControlConfig(
        webhook_secret=SECRET, webhook_hosts=(f"localhost:{receiver.port}",), webhook_pause=0.01, webhook_attempts=4
    )
    return Config(broker=broker.config, control=control)


@contextlib.asynccontextmanager
async def running(broker: Broker, config: Config) -> AsyncIterator[ControlWorker]:
    control = ControlWorker(broker, config, broker.config.url or "")
    task = asyncio.create_task(control.async_run())
    yield control
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await control.leave()


async def cancelled(broker: Broker, receiver: Receiver, **hook: Any) -> JobRecord:
    """A job that has ended without a worker."""
    webhook = Webhook(url=receiver.url, **hook)
    record = await broker.jobs.submit(GenerationRequest(model="demo", prompt="Once", webhook=webhook))
    return await broker.jobs.cancel(record.id)


def left(broker: Broker) -> set[str]:
    """Remaining keys of webhooks and of arq."""
    with redis.Redis.from_url(broker.config.url or "") as client:
        keys = {key.decode() for key in client.scan_iter()}
    return {key for key in keys if "webhook" in key or key == "ktqueue:control"}


def check_signature(headers: dict[str, str], body: bytes) -> None:
    """Check the signature as the specification requires of a receiver."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(b"a key of twenty-four bytes", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()


async def test_a_finished_job_is_posted_with_a_signature_until_the_receiver_accepts(
    broker: Broker, config: Config, receiver: Receiver, start_worker: Any, finished: Any
) -> None:
    receiver.answers = [500, 302, 204]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    request = GenerationRequest(
        model="demo", prompt="Once", sampling=sampling, metadata={"order": "7"}, webhook=Webhook(url=receiver.url)
    )
    async with start_worker():
        record = await broker.jobs.submit(request)
        observed = await finished(record.id)
    assert left(broker) == {f"{broker.keys.tag}:webhooks"}  # the webhook waits, because no control worker runs yet
    async with running(broker, config) as control:
        await until(lambda: len(receiver.got) == 3)
        await until(lambda: not control.tasks)
        await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    for headers, body in receiver.got:
        check_signature(headers, body)
        assert headers["host"] == f"localhost:{receiver.port}"
    event = json.loads(receiver.got[-1][1])
    assert (event["type"], event["object"], event["id"]) == ("job.completed", "event", headers["webhook-id"])
    assert event["data"]["id"] == record.id
    assert event["data"]["metadata"] == {"order": "7"}
    assert event["data"]["result"] == [{"index": 0, "text": observed.choices[0][1], "finish_reason": "length"}]
    assert event["data"]["usage"]["completion_tokens"] == 8


async def test_a_webhook_waits_for_the_search_only_and_an_idle_worker_polls_rarely(
    broker: Broker, config: Config, receiver: Receiver
) -> None:
    """A search each half second finds jobs that have ended. What it enqueues does not wait for arq's next poll."""
    async with running(broker, config) as control:
        await until(lambda: control.connected)
        control._idle_seconds = 5.0
        await asyncio.sleep(0.6)  # the next poll is seconds away
        began = asyncio.get_running_loop().time()
        await cancelled(broker, receiver, events=("failed",))
        await until(lambda: receiver.got)
        assert asyncio.get_running_loop().time() - began < 2.0


async def test_other_ends_are_failures_and_only_subscribed_events_are_posted(
    broker: Broker, config: Config, receiver: Receiver
) -> None:
    await cancelled(broker, receiver, events=("completed",))
    wanted = await cancelled(broker, receiver, events=("failed",))
    async with running(broker, config):
        await until(lambda: receiver.got)
        await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
    ((_, body),) = receiver.got
    event = json.loads(body)
    assert (event["type"], event["data"]["id"], event["data"]["state"]) == ("job.failed", wanted.id, "cancelled")
    assert event["data"]["error"]["code"] == "cancelled"


async def test_a_damaged_journal_costs_the_result_but_not_the_webhook(
    broker: Broker, config: Config, receiver: Receiver
) -> None:
    record = await cancelled(broker, receiver)
    with redis.Redis.from_url(broker.config.url or "") as client:
        journal = f"{broker.keys.tag}:journal:{record.id}"
        client.delete(journal)
        client.xadd(journal, {"e": "x"}, id="1-0")
    async with running(broker, config):
        await until(lambda: receiver.got)
    assert json.loads(receiver.got[0][1])["data"]["result"] is None


async def test_a_webhook_has_a_limited_number_of_attempts(broker: Broker, config: Config, receiver: Receiver) -> None:
    receiver.answers = [500]
    await cancelled(broker, receiver)
    async with running(broker, config):
        await until(lambda: len(receiver.got) == 4)
        await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
    assert len(receiver.got) == 4


async def test_a_webhook_waits_until_the_redis_of_its_job_is_back(
    broker: Broker, config: Config, receiver: Receiver, tmp_path: Path, model: Any
) -> None:
    receiver.answers = [500, 200]
    (port,) = free_ports(1)
    server = Server(tmp_path, port, "appendonly yes", "maxmemory-policy noeviction")
    away = replace(broker.config, url=f"redis://127.0.0.1:{port}/0", connect_timeout=0.2)
    control = replace(config.control, redis_url=broker.config.url, webhook_pause=0.5)
    try:
        async with await Broker.open(away) as of_job:
            await (await Lease.register(of_job, model.card())).close()
            async with running(of_job, replace(config, broker=away, control=control)):
                await cancelled(of_job, receiver)
                await until(lambda: len(receiver.got) == 1)
                await until(lambda: server("EXISTS", f"{of_job.keys.tag}:webhooks") == 0)
                server.kill()
                await asyncio.sleep(2)
                server.start()
                await until(lambda: len(receiver.got) == 2)
    finally:
        server.kill()


async def test_a_receiver_that_answers_gone_is_not_called_again(
    broker: Broker, config: Config, receiver: Receiver
) -> None:
    receiver.answers = [410]
    await cancelled(broker, receiver)
    async with running(broker, config):
        await until(lambda: receiver.got)
        await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
    assert len(receiver.got) == 1


async def test_a_webhook_is_posted_again_after_its_worker_is_killed(
    broker: Broker, config: Config, receiver: Receiver
) -> None:
    def start() -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **config_environment(config)}
        return subprocess.Popen([sys.executable, "-m", "ktqueue.workers.arq.control"], cwd=ROOT, env=environment)

    receiver.answers = [None, 200]
    await cancelled(broker, receiver)
    process = start()
    try:
        await until(lambda: receiver.got)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start()
        await until(lambda: len(receiver.got) == 2)
        await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()
    assert receiver.got[0][1] == receiver.got[1][1]


async def test_private_addresses_are_not_called(config: Config, receiver: Receiver) -> None:
    strict = replace(config.control, webhook_hosts=())
    event = {"id": "evt_1"}
    with pytest.raises(Undeliverable, match="https"):
        await deliver(Webhook(url=receiver.url), event, strict)
    for host in ("localhost", "127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:127.0.0.1]"):
        with pytest.raises(Undeliverable, match="public Internet"):
            await deliver(Webhook(url=f"https://{host}:{receiver.port}/"), event, strict)
    for host in ("256.1.1.1", "[v1.a]", "a" * 64 + ".org"):
        with pytest.raises(Undeliverable, match=r"Invalid IP|63 characters"):
            await deliver(Webhook(url=f"https://{host}/"), event, strict)
    assert receiver.got == []
    for private in (
        "10.0.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "fe80::1",
        "fd00::1",
        "fec0::1",
        "::10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b:1::1",
        "64:ff9b::7f00:1",
    ):
        assert not is_public(private), private
    assert is_public("93.184.215.14")
    assert is_public("2606:4700::1111")


async def test_https_is_called_by_name_with_certificates_checked(broker: Broker, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with (
        contextlib.closing(Receiver(authority.certificate("localhost"))) as receiver,
        contextlib.closing(Receiver(authority.certificate("example.org"))) as stranger,
    ):
        hosts = (f"localhost:{receiver.port}", f"localhost:{stranger.port}")  # private addresses, but with TLS
        control = ControlConfig(
            webhook_secret=SECRET, webhook_hosts=hosts, webhook_pause=0.01, webhook_attempts=2,
            webhook_ca_certs=str(authority.file),
        )  # fmt: skip
        record = await cancelled(broker, receiver)
        async with running(broker, Config(broker=broker.config, control=control)):
            await until(lambda: not left(broker) - {"ktqueue:control:ktqueue-health-check"})
        ((headers, body),) = receiver.got
        check_signature(headers, body)
        assert headers["host"] == f"localhost:{receiver.port}"
        assert json.loads(body)["data"]["id"] == record.id
        for other, settings, fault in (
            (stranger, control, "not valid for"),
            (receiver, replace(control, webhook_ca_certs=None), "self-signed|unable to get local issuer"),
        ):
            with pytest.raises(Undelivered, match=fault):
                await deliver(Webhook(url=other.url), {"id": "evt_1"}, settings)
        assert (len(receiver.got), stranger.got) == (1, [])


def test_the_example_of_the_specification_gets_the_same_signature() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = signed_headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", body, 1614265330.0)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert key_of("plain") == b"plain"
    with pytest.raises(ConfigError):
        key_of("whsec_!")


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"webhook_ca_certs": "/nowhere.pem"}, "control.webhook_ca_certs must be a PEM file .*, got '/nowhere.pem'"),
        ({"webhook_ca_certs": __file__}, "control.webhook_ca_certs must be a PEM file"),
        ({"redis_url": "mail://h"}, "control.redis_url: it must start with redis://"),
    ],
)
async def test_a_control_worker_names_a_setting_that_cannot_work(
    broker: Broker, control: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ControlWorker(broker, Config(broker=broker.config, control=ControlConfig(**control)), broker.config.url or "")  # type: ignore[arg-type]
