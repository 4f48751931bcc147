"""Errors that only the gateway raises."""

from ktqueue.core.errors import InvalidRequest, JournalRegressed, KtqueueError, Unavailable


class MalformedBody(InvalidRequest):
    """The body is not a JSON object in UTF-8."""

    code = "invalid_json"


class PermissionDenied(KtqueueError):
    """The key is known, and does not open this."""

    code = "permission_denied"
    status = 403


class UnsupportedMediaType(KtqueueError):
    """The body's content type is not JSON."""

    code = "unsupported_media_type"
    status = 415


class RouteNotFound(KtqueueError):
    """No such path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(KtqueueError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class MalformedRequest(KtqueueError):
    """The bytes are no HTTP request."""

    code = "malformed_request"
    status = 400


class SlowBody(KtqueueError):
    """The body came too slowly, or stopped coming."""

    code = "request_timeout"
    status = 408


class SlowHeaders(KtqueueError):
    """The headers did not end in time."""

    code = "request_timeout"
    status = 408


class UrlTooLong(KtqueueError):
    """The request's target has too many bytes."""

    code = "url_too_long"
    status = 414


class HeadersTooLarge(KtqueueError):
    """There are too many headers, or too many bytes of them."""

    code = "headers_too_large"
    status = 431


class TooManyConnections(Unavailable):
    """The gateway has as many connections, or answers as many requests at once, as it may."""

    code = "too_many_connections"


class TooManyFromAddress(KtqueueError):
    """One address has as many connections as it may."""

    code = "too_many_connections_from_address"
    status = 429


class TooManyBodyBytes(Unavailable):
    """The bodies that are being read together have too many bytes."""

    code = "too_many_body_bytes"


class UnknownEvent(JournalRegressed):
    """A reader says that it has an event which the journal does not hold."""

    status = 400


class ShuttingDown(Unavailable):
    """The gateway stops; another one, or this one restarted, will answer."""

    code = "shutting_down"


class ClientGone(KtqueueError):
    """The client closed the connection: nobody is left to tell."""

    code = "client_closed_request"
    status = 499


class InternalError(KtqueueError):
    """A fault of ours; the log knows more."""
