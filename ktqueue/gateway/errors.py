"""Errors that only the gateway raises."""

from ktqueue.core.errors import InvalidRequest, JournalRegressed, KtqueueError, Unavailable


class MalformedBody(InvalidRequest):
    """The body is not a JSON object in UTF-8."""

    code = "invalid_json"


class MalformedForm(InvalidRequest):
    """The body is not multipart/form-data, or has more parts than an upload needs."""

    code = "invalid_form"


class PermissionDenied(KtqueueError):
    """The API key is known, but may not do this."""

    code = "permission_denied"
    status = 403


class HostNotAllowed(KtqueueError):
    """The `Host` header has a name that is not the gateway's."""

    code = "host_not_allowed"
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
    """The bytes are not an HTTP request."""

    code = "malformed_request"
    status = 400


class RangeNotSatisfiable(KtqueueError):
    """The file has no bytes of the `Range` that was asked for."""

    code = "range_not_satisfiable"
    status = 416


class RequestTimeout(KtqueueError):
    """The headers did not end in time, or the body arrived too slowly or stopped arriving."""

    code = "request_timeout"
    status = 408


class UrlTooLong(KtqueueError):
    """The URL of the request has too many bytes."""

    code = "url_too_long"
    status = 414


class HeadersTooLarge(KtqueueError):
    """The request has too many headers, or too many bytes of headers."""

    code = "headers_too_large"
    status = 431


class TooManyConnections(Unavailable):
    """The gateway has reached its limit of connections, or of requests at once."""

    code = "too_many_connections"


class TooManyFromAddress(KtqueueError):
    """One address has reached its limit of connections."""

    code = "too_many_connections_from_address"
    status = 429


class TooManyBodyBytes(Unavailable):
    """All bodies that are being read have too many bytes together."""

    code = "too_many_body_bytes"


class TooManyUploads(Unavailable):
    """The gateway receives as many files as it may at once."""

    code = "too_many_uploads"


class UnknownEvent(JournalRegressed):
    """A reader claims to have an event that is not in the journal."""

    status = 400


class ShuttingDown(Unavailable):
    """The gateway is stopping. Another gateway, or this one after its restart, will answer."""

    code = "shutting_down"


class ClientGone(KtqueueError):
    """The client closed the connection, so nobody reads this error."""

    code = "client_closed_request"
    status = 499


class InternalError(KtqueueError):
    """An unexpected error in the gateway. The log has the details."""
