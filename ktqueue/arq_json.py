"""The `job_serializer` and `job_deserializer` for arq's clients: arq's records as JSON instead of pickle.

    pool = await arq.create_pool(settings, job_serializer=dumps, job_deserializer=loads)

A failed job's result is an exception, which becomes {"error": {"code", "message", ...}} in JSON; `loads` makes the
exception again. Knows arq's field names `s` (success) and `r` (result), but does not import arq.
"""

import asyncio
from dataclasses import asdict, fields
from typing import Any

from ktqueue.core import codec
from ktqueue.core.errors import ErrorInfo, KtqueueError, error_of

ABORTED = "aborted"  # error code of a job that arq's `Job.abort` ended

_ERROR_FIELDS = frozenset(field.name for field in fields(ErrorInfo))


def dumps(record: dict[str, Any]) -> bytes:
    """Encode a job or a result of arq. Raises TypeError for values that JSON does not have."""
    fault = record.get("r")
    if isinstance(fault, BaseException):
        record = {**record, "r": {"error": _plain(fault)}}
    return codec.dumps(record)


def loads(data: bytes) -> dict[str, Any]:
    """Decode what `dumps` encoded. Raises CodecError, also for pickle, which is never read."""
    record = codec.loads(data)
    if not isinstance(record, dict):
        raise codec.CodecError("not an arq record: no JSON object")
    result = record.get("r")
    if record.get("s") is False and isinstance(result, dict) and isinstance(result.get("error"), dict):
        record["r"] = _exception(result["error"])
    return record


def _plain(fault: BaseException) -> dict[str, Any]:
    if isinstance(fault, KtqueueError):
        info = fault.info()
    elif isinstance(fault, asyncio.CancelledError):
        info = ErrorInfo(code=ABORTED, message="the job was aborted", status=499)
    else:
        cause = f": {fault.__cause__}" if fault.__cause__ is not None else ""
        info = ErrorInfo(code=KtqueueError.code, message=f"{type(fault).__name__}: {fault}{cause}")
    return {key: value for key, value in asdict(info).items() if value is not None}


def _exception(error: dict[str, Any]) -> BaseException:
    if error.get("code") == ABORTED:
        return asyncio.CancelledError(error.get("message"))
    known = {key: value for key, value in error.items() if key in _ERROR_FIELDS}
    return error_of(ErrorInfo(**{"code": KtqueueError.code, "message": "the job failed", **known}))
