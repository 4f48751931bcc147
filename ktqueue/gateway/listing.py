"""Lists over HTTP: how many entries a client asks for and in which order, and OpenAI's page of a list."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from starlette.requests import Request

from ktqueue.core.errors import InvalidRequest


class Listed(Protocol):
    """A record that can be in a list."""

    @property
    def id(self) -> str:
        """Its id, after which the next page begins."""


Record = TypeVar("Record", bound=Listed)


def limit_of(request: Request, *, default: int, most: int) -> int:
    """The query's `limit`, from 1 to `most`. Raises InvalidRequest."""
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal()) or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise InvalidRequest.must_be("limit", f"from 1 to {most}", limit[:80], limit=most)
    return int(limit)


def order_of(request: Request) -> Literal["asc", "desc"]:
    """The query's `order`, by default desc: the latest first. Raises InvalidRequest."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.must_be("order", "asc or desc", order[:80], limit="asc, desc")
    return "asc" if order == "asc" else "desc"


def page_json(records: Sequence[Record], as_json: Callable[[Record], Any], *, has_more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's."""
    return {
        "object": "list",
        "data": [as_json(record) for record in records],
        "first_id": records[0].id if records else None,
        "last_id": records[-1].id if records else None,
        "has_more": has_more,
    }
