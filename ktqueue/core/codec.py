"""Dataclasses to versioned JSON bytes and back (the door to orjson). Never pickle.

Every record begins with `v`, its format. A record with something that older versions must not overlook, such as a new
sampling parameter, is written in a new format, which is VERSION then; all others stay in the older one. So a field that
is unknown in a known format can be ignored, and is. Formats up to VERSION are read.
Keys of journal events are short because there is one event a token; fields at their default value are left out.
Decoding validates and raises CodecError.
"""

from base64 import b64decode, b64encode
from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

import orjson

from ktqueue.core.errors import ErrorInfo, InvalidRequest, KtqueueError
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, TokenEvent, TokenLogprob, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

VERSION = 1
_REQUEST_FIELDS = tuple(one.name for one in fields(GenerationRequest))
_SAMPLING_FIELDS = frozenset(one.name for one in fields(SamplingParams))
_ERROR_FIELDS = frozenset(one.name for one in fields(ErrorInfo))
_CARD_FIELDS = frozenset(one.name for one in fields(ModelCard))
# Of a card. The first release refuses a card with any other, so newer ones are kept beside it.
_FIRST_CARD_FIELDS = (
    "name", "created", "max_model_len", "vocab_size", "architecture", "quantization", "max_num_seqs"
)  # fmt: skip
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, a token that could not be chosen: JSON has no infinity


class CodecError(KtqueueError):
    """The bytes are not a record of a version that this process knows."""

    code = "codec_error"


class NewerFormat(CodecError):
    """The bytes are a record of a format that only newer versions read; `value` is its number."""

    code = "newer_format"
    status = 503  # while versions are mixed, another gateway may read it


def dumps(value: Any) -> bytes:
    """Plain data (str keys or int keys) to compact JSON bytes."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def loads(data: bytes | str) -> Any:
    """JSON bytes to plain data. Raises CodecError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CodecError(f"not JSON: {error}") from error


def _record(data: bytes | str) -> dict[str, Any]:
    value = loads(data)
    version = value.pop("v", None) if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise CodecError(f"not a record with a version: {data[:80]!r}")
    if version > VERSION:
        raise NewerFormat(
            f"a record of format {version}, which a newer version of ktqueue wrote; this version reads formats up to "
            f"{VERSION}",
            limit=VERSION,
            value=version,
        )
    record: dict[str, Any] = value
    return record


def _known(value: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields that this version knows."""
    return {name: value[name] for name in value if name in names}


def encode_request(request: GenerationRequest) -> bytes:
    """A request as JSON; the same request always gives the same bytes.

    Raises InvalidRequest for what JSON cannot hold: half a surrogate pair, a number of more than 64 bits, an object.
    """
    try:
        # orjson takes the dataclass within as it is; asdict would copy everything first, ten times slower.
        return dumps({"v": VERSION, **{name: getattr(request, name) for name in _REQUEST_FIELDS}})
    except TypeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def decode_request(data: bytes | str) -> GenerationRequest:
    """Inverse of `encode_request`. Raises CodecError or InvalidRequest."""
    value = _record(data)
    try:
        sampling = value.pop("sampling")
        bias = {int(k): v for k, v in sampling.pop("logit_bias").items()}
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        for name in ("messages", "prompt_token_ids", "tools"):
            if value[name] is not None:
                value[name] = tuple(value[name])
        value["job_class"] = JobClass(value["job_class"])
        params = SamplingParams(logit_bias=bias, **_known(sampling, _SAMPLING_FIELDS))
        return GenerationRequest(sampling=params, **_known(value, _REQUEST_FIELDS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CodecError(f"not a generation request: {error}") from error


def encode_card(card: ModelCard) -> bytes:
    """A model card as JSON, as far as the first release reads it."""
    return dumps({"v": 1, **_known(asdict(card), _FIRST_CARD_FIELDS)})


def encode_card_more(card: ModelCard) -> bytes:
    """The fields of a model card that the first release did not have, as JSON."""
    return dumps({name: value for name, value in asdict(card).items() if name not in _FIRST_CARD_FIELDS})


def decode_card(data: bytes | str, more: bytes | str | None = None) -> ModelCard:
    """Inverse of `encode_card`, with the `more` of `encode_card_more` where there is any. Raises CodecError."""
    try:
        newer = {} if more is None else loads(more)
        return ModelCard(**_known({**newer, **_record(data)}, _CARD_FIELDS))
    except TypeError as error:
        raise CodecError(f"not a model card: {error}") from error


def encode_event(event: TokenEvent) -> bytes:
    """A journal event as JSON, without its seq (the journal's own id carries that).

    i: index, t: token ids, x: text, l: logprobs, f: finish reason, s: state, u: usage, e: error.
    """
    value: dict[str, Any] = {"v": VERSION}
    if event.index:
        value["i"] = event.index
    if event.token_ids:
        value["t"] = event.token_ids
    if event.text:
        value["x"] = event.text
    if event.logprobs:
        value["l"] = [[_pack(p.chosen), [_pack(top) for top in p.top]] for p in event.logprobs]
    if event.finish_reason is not None:
        value["f"] = event.finish_reason
    if event.state is not None:
        value["s"] = event.state
    if event.usage is not None:
        value["u"] = [event.usage.prompt_tokens, event.usage.completion_tokens, event.usage.cached_tokens]
    if event.error is not None:
        value["e"] = {k: v for k, v in asdict(event.error).items() if v is not None}
    return dumps(value)


def decode_event(seq: int, data: bytes | str) -> TokenEvent:
    """Inverse of `encode_event`. Raises CodecError."""
    value = _record(data)
    try:
        usage = value.get("u")
        error = value.get("e")
        return TokenEvent(
            seq=seq,
            index=value.get("i", 0),
            token_ids=tuple(value.get("t", ())),
            text=value.get("x", ""),
            logprobs=tuple([PositionLogprobs(_unpack(chosen), tuple(map(_unpack, top))) for chosen, top in value["l"]])
            if "l" in value
            else (),
            finish_reason=FinishReason(value["f"]) if "f" in value else None,
            state=JobState(value["s"]) if "s" in value else None,
            usage=Usage(prompt_tokens=usage[0], completion_tokens=usage[1], cached_tokens=usage[2]) if usage else None,
            error=ErrorInfo(**_known(error, _ERROR_FIELDS)) if error else None,
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as fault:
        raise CodecError(f"not a journal event: {fault}") from fault


def _pack(one: TokenLogprob) -> list[Any]:
    return [one.token_id, b64encode(one.token_bytes).decode(), max(one.logprob, LOWEST_LOGPROB)]


def _unpack(value: list[Any]) -> TokenLogprob:
    token_id, token_bytes, logprob = value
    return TokenLogprob(token_id, b64decode(token_bytes), logprob)
