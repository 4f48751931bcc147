"""A mailbox has a limit of bytes and reports an overflow."""

from typing import Any

import pytest

from ktqueue.broker.redis.hub import Mail, Mailbox


async def test_messages_wait_in_order() -> None:
    mailbox = Mailbox(("c",), 100)
    for message in (b"a", b"b"):
        mailbox.put(message)
    assert await mailbox.take(0) == Mail((b"a", b"b"), False)
    assert await mailbox.take(0.01) == Mail((), False)


@pytest.mark.parametrize("fill", [b"x" * 11, b"x" * 6])
async def test_an_overflow_drops_all_messages_and_is_reported_once(fill: Any) -> None:
    mailbox = Mailbox(("c",), 10)
    mailbox.put(b"12345")
    mailbox.put(fill)
    assert await mailbox.take(0) == Mail((), True)
    mailbox.put(b"12345")
    assert await mailbox.take(0) == Mail((b"12345",), False)


async def test_messages_after_an_overflow_are_kept() -> None:
    mailbox = Mailbox(("c",), 10)
    mailbox.put(b"123456")
    mailbox.put(b"123456")
    mailbox.put(b"7")
    assert await mailbox.take(0) == Mail((b"7",), True)
