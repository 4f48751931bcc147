"""One webhook call: its body, its signature, the check of its address, and the POST. Knows no queue.

Headers and signature are those of the Standard Webhooks specification 1.0: `webhook-id`, `webhook-timestamp` (Unix
seconds), `webhook-signature`: `v1,` and the base64 of HMAC-SHA256 over `ID.TIMESTAMP.BODY`.
"""

import asyncio
import hashlib
import hmac
import socket
import ssl
import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.codec import dumps
from ktqueue.core.config import ControlConfig
from ktqueue.core.errors import ConfigError, KtqueueError
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.webhook import Webhook, is_public
from ktqueue.openai.records import record_json, result_json

SECRET_PREFIX = "whsec_"  # base64 follows, as in the specification; any other secret is used as it is
GONE = 410  # the receiver must not be called again


class Undeliverable(KtqueueError):
    """The address must not be called, or answered that it must not be called again. Another attempt would not help."""

    code = "webhook_undeliverable"


class Undelivered(KtqueueError):
    """This attempt failed. Another one may succeed."""

    code = "webhook_undelivered"


def event_of(state: JobState) -> str:
    """The event of a job that ended in this state."""
    return "completed" if state is JobState.DONE else "failed"


def body_of(record: JobRecord, events: Sequence[TokenEvent]) -> dict[str, Any]:
    """The body of the call, in the form of OpenAI's webhooks.

    `data` is the job with its `result`, which is null once the journal has expired, or if it is damaged.
    """
    result = result_json(record, events) if events else None
    return {
        "id": f"evt_{record.id}",
        "object": "event",
        "created_at": int(record.finished_at or 0),
        "type": f"job.{event_of(record.state)}",
        "data": {**record_json(record), "result": result},
    }


def key_of(secret: str) -> bytes:
    """The key to sign with. Raises ConfigError."""
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    try:
        return b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except Base64Error as error:
        raise ConfigError(
            "control.webhook_secret must have base64 after whsec_", param="control.webhook_secret"
        ) from error


def signed_headers(secret: str, message_id: str, body: bytes, now: float) -> dict[str, str]:
    """The three headers of the specification."""
    timestamp = str(int(now))
    digest = hmac.new(key_of(secret), f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{b64encode(digest).decode()}",
    }


async def deliver(webhook: Webhook, value: dict[str, Any], config: ControlConfig) -> None:
    """POST it once, without following redirects or reading the answer's body. Raises Undeliverable or Undelivered."""
    try:
        webhook.check_allowed(config.webhook_secret, config.webhook_hosts)
    except KtqueueError as error:
        raise Undeliverable(error.message) from error
    assert config.webhook_secret is not None
    body = dumps(value)
    headers = {
        "content-type": "application/json",
        "user-agent": "ktqueue",
        "host": urlsplit(webhook.url).netloc,
        **signed_headers(config.webhook_secret, value["id"], body, time.time()),
    }
    try:
        async with (
            asyncio.timeout(config.webhook_timeout),
            httpx.AsyncClient(trust_env=False, verify=trusted(config)) as client,
        ):
            url, host = await _pinned(webhook, config)
            request = client.build_request(
                "POST", url, content=body, headers=headers, timeout=config.webhook_timeout,
                extensions={"sni_hostname": host},
            )  # fmt: skip
            answer = await client.send(request, stream=True)
            await answer.aclose()
    except (httpx.HTTPError, ConfigError, OSError) as error:  # asyncio's TimeoutError is an OSError
        raise Undelivered(f"{webhook.url}: {type(error).__name__} {error}") from error
    if answer.status_code == GONE:
        raise Undeliverable(f"{webhook.url} answers 410, so it is not called again")
    if not answer.is_success:
        raise Undelivered(f"{webhook.url} answers {answer.status_code}")


def trusted(config: ControlConfig) -> ssl.SSLContext:
    """The certificates to trust. Raises ConfigError if the file `control.webhook_ca_certs` cannot be read."""
    context = httpx.create_ssl_context(trust_env=False)
    if config.webhook_ca_certs is not None:
        try:
            context.load_verify_locations(config.webhook_ca_certs)
        except OSError as error:  # also of a file without certificates
            wanted = f"a PEM file of certificates ({error.strerror or error})"
            raise ConfigError.must_be("control.webhook_ca_certs", wanted, config.webhook_ca_certs) from error
    return context


async def _pinned(webhook: Webhook, config: ControlConfig) -> tuple[httpx.URL, str]:
    """Return the URL with the host's address, and the host's name for TLS.

    The name is resolved once, so the address that was checked is the one that is called. A second resolution could give
    another address. Raises Undeliverable for an address that is not public, and for a URL that cannot be read.
    """
    try:
        url = httpx.URL(webhook.url)
    except httpx.InvalidURL as error:
        raise Undeliverable(f"{webhook.url}: {error}") from error
    port = url.port or (443 if url.scheme == "https" else 80)
    entries = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = [str(socket_address[0]).partition("%")[0] for *_, socket_address in entries]
    if not webhook.trusted(config.webhook_hosts):
        for address in addresses:
            if not is_public(address):
                raise Undeliverable(f"{webhook.url} resolves to {address}, which is not on the public Internet")
    return url.copy_with(host=addresses[0]), url.host
