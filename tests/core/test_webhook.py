"""Webhook: which URLs and events a request may name."""

from typing import Any

import pytest

from ktqueue.core.codec import decode_request, encode_request
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import GenerationRequest
from ktqueue.core.webhook import Webhook


def test_a_request_keeps_its_webhook() -> None:
    hook: Any = {"url": "https://example.org/hook?job=1", "events": ["failed"]}
    request = GenerationRequest(model="demo", prompt="Once", webhook=hook)
    assert request.webhook == Webhook(url="https://example.org/hook?job=1", events=("failed",))
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize(
    "url",
    ["", "ftp://example.org/", "https://", "https://user:word@example.org/", "https://example.org/a b", "file:///x",
     "https://example.org:0/", "https://example.org:99999/", "https://ex\u00e4mple.org/", "https://a/\r\nhost: b",
     "https://example.org/" + "a" * 2_048, 7],
)  # fmt: skip
def test_a_text_that_is_not_a_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Webhook(url=url)
    assert refused.value.param == "webhook.url"


@pytest.mark.parametrize("events", [(), ("done",), "completed", ("completed", "done")])
def test_unknown_events_are_refused(events: Any) -> None:
    with pytest.raises(InvalidRequest, match="completed, failed"):
        Webhook(url="https://example.org/", events=events)


def test_only_https_and_trusted_hosts_are_allowed() -> None:
    plain = Webhook(url="http://intern:8080/hook")
    Webhook(url="https://example.org/").check_allowed("secret", ())
    for hosts in ((), ("intern:80",), ("other", "8080")):
        with pytest.raises(InvalidRequest, match="https"):
            plain.check_allowed("secret", hosts)
    plain.check_allowed("secret", ("intern",))
    plain.check_allowed("secret", ("intern:8080",))
    for host in ("a" * 64 + ".org", "a..org"):
        with pytest.raises(InvalidRequest, match="parts of 1 to 63 characters"):
            Webhook(url=f"https://{host}/").check_allowed("secret", ())
    with pytest.raises(InvalidRequest, match="webhook_secret"):
        Webhook(url="https://example.org/").check_allowed(None, ())
