"""Dataclasses to versioned JSON bytes and back, by orjson. Never pickle.

Every record begins with `v`, the number of its format. Formats up to VERSION are read. A record gets a new format only
if older versions must not ignore something in it, such as a new sampling parameter. Unknown fields of a known format
are therefore ignored. Fields that the first release did not have are left out at their default. Format 2 is that of
requests with a field that workers of format 1 must not ignore.
Keys of journal events are short because there is an event for each token. Fields at their default are left out.
Decoding checks the record and raises CodecError.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any

import orjson

from ktqueue.core.errors import ErrorInfo, InvalidRequest, KtqueueError
from ktqueue.core.events import (
    FinishReason,
    JobState,
    PositionLogprobs,
    PromptPart,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

Json = dict[str, Any]
"""A JSON object as plain data."""
VERSION = 2
# The values of fields that the first release did not have, and that stand for what it does.
_LATER_SAMPLING: dict[str, Any] = {
    "prompt_logprobs": None, "bad_words": (), "allowed_token_ids": (), "skip_special_tokens": True,
    "include_stop_str_in_output": False,
}  # fmt: skip
_LATER_REQUEST: dict[str, Any] = {
    "chat_template": None, "add_generation_prompt": True, "continue_final_message": False, "force_thinking": False,
    "suffix": None, "truncate_prompt_tokens": None, "prompt_only": False, "return_prompt": False,
    "return_pieces": False, "add_special_tokens": None, "grammar": None,
}  # fmt: skip
# Workers of format 1 may ignore these: they concern how the answer is read.
_READERS_FIELDS: dict[str, Any] = {
    "tool_parser": "", "reasoning_parser": "", "endpoint": "", "reply_options": {}, "grammar_field": "grammar",
}  # fmt: skip
_LATER_FIELDS = {**_LATER_REQUEST, **_READERS_FIELDS}
_FIRST_FIELDS = tuple(field.name for field in fields(GenerationRequest) if field.name not in _LATER_FIELDS)
_FIRST_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in _LATER_SAMPLING)
_REQUEST_FIELDS = frozenset(field.name for field in fields(GenerationRequest))
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_TIMINGS = tuple(field.name for field in fields(Timings))
_ERROR_FIELDS = frozenset(field.name for field in fields(ErrorInfo))
_CARD_FIELDS = frozenset(field.name for field in fields(ModelCard))
# The first release refuses a card with other fields, so newer fields are stored separately.
_FIRST_CARD_FIELDS = (
    "name", "created", "max_model_len", "vocab_size", "architecture", "quantization", "max_num_seqs"
)  # fmt: skip
_LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029")
LOWEST_LOGPROB = -9999.0  # means minus infinity, for a token that could not be chosen: JSON has no infinity


class CodecError(KtqueueError):
    """The bytes are not a record that this version can read."""

    code = "codec_error"


class NewerFormat(CodecError):
    """Only newer versions can read this record; `value` is the number of its format."""

    code = "newer_format"
    status = 503  # during an upgrade another gateway may read it


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise CodecError, with the name of the record, for what the decoder of a damaged record raises."""
    try:
        yield
    except NewerFormat:
        raise
    except (AttributeError, CodecError, KeyError, TypeError, ValueError) as error:
        raise CodecError(f"the record of {name} is damaged, or a newer version wrote it: {error}") from error


def named(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Rows that begin with a name, decoded. Without those whose name is damaged: all our names are UTF-8."""
    for name, *rest in rows:
        with suppress(UnicodeDecodeError):
            yield (name.decode(), *rest)


def dumps(value: Any) -> bytes:
    """Write plain data (str or int keys) as compact JSON bytes."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def dumps_line(value: Any) -> bytes:
    """Write plain data as one line of a JSON lines file, with its newline.

    Characters that end a line for `str.splitlines` are escaped: clients split texts of these files with it.
    """
    data = dumps(value)
    for character, escaped in _LINE_ENDS:
        data = data.replace(character, escaped)
    return data + b"\n"


def loads(data: bytes | str) -> Any:
    """Read plain data from JSON bytes. Raises CodecError."""
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
    """Write a request as JSON. Equal requests give equal bytes.

    Raises InvalidRequest for values that JSON cannot hold: half a surrogate pair, a number of more than 64 bits, an
    object.
    """
    later = _changed(request, _LATER_REQUEST)
    later_sampling = _changed(request.sampling, _LATER_SAMPLING)
    is_first_format = not later and not later_sampling and request.sampling.max_tokens != 0
    # The fields are collected here, since asdict would copy everything first, which takes ten times as long.
    value = {name: getattr(request, name) for name in _FIRST_FIELDS}
    value["sampling"] = {name: getattr(request.sampling, name) for name in _FIRST_SAMPLING} | later_sampling
    try:
        return dumps({"v": 1 if is_first_format else 2, **value, **later, **_changed(request, _READERS_FIELDS)})
    except TypeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def request_hashes(request: GenerationRequest) -> str:
    """Hashes of what must be equal in requests under one idempotency key, in hex: the one to store, and an older one.

    The form of the answer is not part of it, since each version may note more of it, and clients come back after an
    upgrade. Earlier versions stored a hash of everything.
    """
    hashes = [hashlib.sha256(encode_request(replace(request, reply_options={}))).hexdigest()]
    if request.reply_options:
        hashes.append(hashlib.sha256(encode_request(request)).hexdigest())
    return " ".join(hashes)


def _changed(source: GenerationRequest | SamplingParams, defaults: dict[str, Any]) -> dict[str, Any]:
    """The fields of `source` that are not at the default."""
    return {name: value for name, default in defaults.items() if (value := getattr(source, name)) != default}


def decode_request(data: bytes | str) -> GenerationRequest:
    """Inverse of `encode_request`. Raises CodecError or InvalidRequest."""
    value = _record(data)
    try:
        sampling = value.pop("sampling")
        bias = {int(k): v for k, v in sampling.pop("logit_bias").items()}
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            sampling[name] = tuple(sampling.get(name, ()))
        for name in ("messages", "prompt_token_ids", "tools"):
            if value[name] is not None:
                value[name] = tuple(value[name])
        value["job_class"] = JobClass(value["job_class"])
        params = SamplingParams(logit_bias=bias, **_known(sampling, _SAMPLING_FIELDS))
        return GenerationRequest(sampling=params, **_known(value, _REQUEST_FIELDS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CodecError(f"not a generation request: {error}") from error


def encode_card(card: ModelCard) -> bytes:
    """Write the fields of a model card that the first release reads, as JSON."""
    return dumps({"v": 1, **_known(asdict(card), _FIRST_CARD_FIELDS)})


def encode_card_more(card: ModelCard) -> bytes:
    """Write the fields of a model card that the first release does not know, as JSON."""
    return dumps({name: value for name, value in asdict(card).items() if name not in _FIRST_CARD_FIELDS})


def decode_card(data: bytes | str, more: bytes | str | None = None) -> ModelCard:
    """Inverse of `encode_card`; `more` is the result of `encode_card_more`, if any. Raises CodecError."""
    try:
        newer = {} if more is None else loads(more)
        value = _known({**newer, **_record(data)}, _CARD_FIELDS)
        value["aliases"] = tuple(value.get("aliases", ()))
        return ModelCard(**value)
    except TypeError as error:
        raise CodecError(f"not a model card: {error}") from error


def encode_event(event: TokenEvent) -> bytes:
    """Write a journal event as JSON, without `seq`, which is the entry's id in the journal.

    Keys are i: index, t: token ids, x: text, l: logprobs, f: finish reason, s: state, u: usage, e: error,
    p: prompt, o: opening.
    """
    value: dict[str, Any] = {"v": 1}
    if event.index:
        value["i"] = event.index
    if event.token_ids:
        value["t"] = event.token_ids
    if event.text:
        value["x"] = event.text
    if event.logprobs:
        value["l"] = [_pack_position(position) for position in event.logprobs]
    if event.finish_reason is not None:
        value["f"] = event.finish_reason
    if event.state is not None:
        value["s"] = event.state
    if event.usage is not None:
        usage, timings = event.usage, event.usage.timings
        value["u"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
        if timings is not None:
            value["u"] += [timings.queue, timings.tokenise, timings.prefill, timings.decode]
    if event.error is not None:
        value["e"] = {k: v for k, v in asdict(event.error).items() if v is not None}
    if event.prompt is not None:
        value["p"] = _pack_prompt(event.prompt)
    if event.opening:
        value["o"] = event.opening
    return dumps(value)


def decode_event(seq: int, data: bytes | str) -> TokenEvent:
    """Inverse of `encode_event`. Raises CodecError."""
    value = _record(data)
    try:
        usage = value.get("u")
        error = value.get("e")
        return TokenEvent(
            seq=seq,
            index=_whole(value.get("i", 0)),
            token_ids=_whole_numbers(value.get("t", ())),
            text=_text(value.get("x", "")),
            logprobs=tuple([_unpack_position(position) for position in value["l"]]) if "l" in value else (),
            finish_reason=FinishReason(value["f"]) if "f" in value else None,
            state=JobState(value["s"]) if "s" in value else None,
            usage=_unpack_usage(usage) if usage else None,
            error=_unpack_error(error) if error else None,
            prompt=_unpack_prompt(value["p"]) if "p" in value else None,
            opening=_text(value.get("o", "")),
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as fault:
        raise CodecError(f"not a journal event: {fault}") from fault


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not set(map(type, values)) <= {int}:
        raise TypeError("token ids are not whole numbers")
    return tuple(values)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value


def _pack(token: TokenLogprob) -> list[Any]:
    return [token.token_id, b64encode(token.token_bytes).decode(), max(token.logprob, LOWEST_LOGPROB)]


def _unpack(value: list[Any]) -> TokenLogprob:
    token_id, token_bytes, logprob = value
    return TokenLogprob(_whole(token_id), b64decode(token_bytes), _number(logprob))


def _pack_position(position: PositionLogprobs) -> list[Any]:
    return [_pack(position.chosen), [_pack(top) for top in position.top]]


def _unpack_position(value: list[Any]) -> PositionLogprobs:
    chosen, top = value
    return PositionLogprobs(_unpack(chosen), tuple(map(_unpack, top)))


def _unpack_usage(value: list[Any]) -> Usage:
    counts, seconds = [_whole(count) for count in value[:3]], [_number(second) for second in value[3:7]]
    timings = Timings(**dict(zip(_TIMINGS, seconds, strict=True))) if seconds else None
    return Usage(prompt_tokens=counts[0], completion_tokens=counts[1], cached_tokens=counts[2], timings=timings)


def _unpack_error(value: dict[str, Any]) -> ErrorInfo:
    for text in (value["code"], value["message"], value.get("param", "")):
        _text(text)
    _whole(value.get("status", 0))
    return ErrorInfo(**_known(value, _ERROR_FIELDS))


def _pack_prompt(part: PromptPart) -> dict[str, Any]:
    """Keys are t: token ids, x: text, b: bytes of each token, l: logprobs, with null for a token that has none."""
    value: dict[str, Any] = {}
    if part.token_ids:
        value["t"] = part.token_ids
    if part.text:
        value["x"] = part.text
    if part.pieces:
        value["b"] = [b64encode(piece).decode() for piece in part.pieces]
    if part.logprobs:
        value["l"] = [None if position is None else _pack_position(position) for position in part.logprobs]
    return value


def _unpack_prompt(value: dict[str, Any]) -> PromptPart:
    return PromptPart(
        token_ids=_whole_numbers(value.get("t", ())),
        text=_text(value.get("x", "")),
        pieces=tuple(map(b64decode, value.get("b", ()))),
        logprobs=tuple([None if entry is None else _unpack_position(entry) for entry in value.get("l", ())]),
    )
