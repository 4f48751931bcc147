"""Lists over HTTP: how many entries a client asks for and in which order, and OpenAI's page of a list."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from ktqueue.core.errors import InvalidRequest

Record = TypeVar("Record")


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


def page_json(
    records: Sequence[Record], as_json: Callable[[Record], dict[str, Any]], *, has_more: bool
) -> dict[str, Any]:
    """A page of a list, as OpenAI's. `as_json` returns objects with an `id`."""
    data = [as_json(record) for record in records]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
