"""Records survive a round trip through JSON, and anything else is refused."""

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktqueue.core.codec import (
    CodecError,
    NewerFormat,
    decode_card,
    decode_event,
    decode_request,
    dumps_line,
    encode_card,
    encode_card_more,
    encode_event,
    encode_request,
    loads,
)
from ktqueue.core.errors import ErrorInfo, InvalidRequest
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

quick = settings(max_examples=60, deadline=None)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
words = text.filter(bool)
ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 10**9)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=ids,
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(words, max_size=4).map(tuple),
    stop_token_ids=st.lists(ids, max_size=4).map(tuple),
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 128),
    prompt_logprobs=st.none() | st.integers(0, 20),
    bad_words=st.lists(words, max_size=3).map(tuple),
    allowed_token_ids=st.lists(ids, max_size=4).map(tuple),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": words}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(ids, min_size=1, max_size=6).map(tuple)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": words, "content": json_values}), min_size=1, max_size=3
            ).map(tuple)
        }
    ),
)
requests = st.builds(
    lambda prompt, **rest: GenerationRequest(**prompt, **rest),
    prompt=prompts,
    model=words,
    sampling=samplings,
    job_class=st.sampled_from(JobClass),
    priority=st.integers(-100, 100),
    expires_in=st.none() | st.floats(0.001, 86400),
    tools=st.lists(st.dictionaries(text, json_values, max_size=3), max_size=2).map(tuple),
    chat_template_kwargs=st.dictionaries(text, json_values, max_size=3),
    user=st.none() | text,
    metadata=st.dictionaries(text, text, max_size=3),
    truncate_prompt_tokens=st.none() | st.integers(1, 2**31 - 1),
    prompt_only=st.booleans(),
    return_prompt=st.booleans(),
    return_pieces=st.booleans(),
    add_special_tokens=st.none() | st.booleans(),
    grammar=st.none() | words,
    tool_parser=text,
    reasoning_parser=text,
    endpoint=text,
    reply_options=st.dictionaries(text, json_values, max_size=3),
)
token_logprobs = st.builds(TokenLogprob, ids, st.binary(max_size=6), st.floats(-9_999, 0))
positions = st.builds(PositionLogprobs, token_logprobs, st.lists(token_logprobs, max_size=3).map(tuple))
seconds = st.floats(0, 1e6)
events = st.builds(
    TokenEvent,
    seq=st.integers(1, 2**40),
    index=st.integers(0, 127),
    token_ids=st.lists(ids, max_size=5).map(tuple),
    text=text,
    logprobs=st.lists(positions, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    state=st.none() | st.sampled_from(JobState),
    usage=st.none()
    | st.builds(
        Usage,
        prompt_tokens=counts,
        completion_tokens=counts,
        cached_tokens=counts,
        timings=st.none() | st.builds(Timings, queue=seconds, tokenise=seconds, prefill=seconds, decode=seconds),
    ),
    prompt=st.none()
    | st.builds(
        PromptPart,
        token_ids=st.lists(ids, max_size=5).map(tuple),
        pieces=st.lists(st.binary(max_size=4), max_size=3).map(tuple),
        text=text,
        logprobs=st.lists(st.none() | positions, max_size=3).map(tuple),
    ),
    opening=text,
    error=st.none()
    | st.builds(
        ErrorInfo,
        code=words,
        message=text,
        status=st.integers(400, 599),
        param=st.none() | text,
        limit=st.none() | text | counts,
        value=st.none() | text | counts,
    ),
)
cards = st.builds(
    ModelCard,
    name=words,
    created=counts,
    max_model_len=counts,
    vocab_size=counts,
    architecture=text,
    quantization=text,
    max_num_seqs=counts,
    aliases=st.lists(words, max_size=3).map(tuple),
    sampling_defaults=st.dictionaries(words, st.floats(0, 100), max_size=3),
    tool_parser=text,
    reasoning_parser=text,
)


@quick
@given(value=json_values, ends=st.text("\r\v\x1c\x1d\x1e\x85\u2028\u2029", max_size=4))
def test_a_line_of_json_has_no_end_of_a_line_in_it(value: Any, ends: str) -> None:
    data = dumps_line([value, ends])
    assert len(data.decode().splitlines()) == 1
    assert loads(data) == [value, ends]


@quick
@given(requests)
def test_requests_survive_a_round_trip(request: GenerationRequest) -> None:
    data = encode_request(request)
    assert decode_request(data) == request
    assert encode_request(decode_request(data)) == data


@quick
@given(events)
def test_events_survive_a_round_trip(event: TokenEvent) -> None:
    assert decode_event(event.seq, encode_event(event)) == event


@quick
@given(cards)
def test_cards_survive_a_round_trip(card: ModelCard) -> None:
    assert decode_card(encode_card(card), encode_card_more(card)) == card


@quick
@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_a_codec_error(data: bytes) -> None:
    for decode in (decode_request, decode_card, lambda data: decode_event(1, data)):
        with pytest.raises(CodecError):
            decode(data)


@quick
@given(st.dictionaries(st.sampled_from([*"itxlfsue", "sampling", "model", "prompt", "name", "stop"]), json_values))
def test_wrong_fields_never_break_the_decoder(fields: dict[str, Any]) -> None:
    data = json.dumps({**fields, "v": 1}).encode()
    for decode in (decode_request, decode_card, lambda data: decode_event(1, data)):
        with contextlib.suppress(CodecError, InvalidRequest):
            decode(data)


@pytest.mark.parametrize(
    "field",
    [
        {"i": "0"}, {"t": ["7"]}, {"t": [True]}, {"t": "7"}, {"x": 5}, {"o": []}, {"l": [[[1, "YQ==", "-1"], []]]},
        {"u": ["1", 2, 3]}, {"u": [1, 2, 3, 0.1, 0.2, 0.3, "0.4"]}, {"p": {"t": [0.5]}}, {"p": {"x": 1}},
        {"e": {"code": "x", "message": "x", "status": "500"}}, {"e": {"code": 1, "message": "x"}},
    ],
)  # fmt: skip
def test_an_event_with_a_value_of_another_type_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match="not a journal event"):
        decode_event(1, json.dumps({"v": 1, **field}))


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_a_record_without_a_known_version_is_refused(version: object) -> None:
    with pytest.raises(CodecError, match="version"):
        decode_event(1, json.dumps({"v": version}))


def test_the_smallest_event_is_small() -> None:
    assert encode_event(TokenEvent(seq=9, token_ids=(5,), text="a")) == b'{"v":1,"t":[5],"x":"a"}'


def test_a_token_that_could_not_be_chosen_keeps_a_number() -> None:
    event = TokenEvent(seq=1, logprobs=(PositionLogprobs(TokenLogprob(1, b"a", -math.inf)),))
    assert decode_event(1, encode_event(event)).logprobs[0].chosen.logprob == -9_999


@pytest.mark.parametrize("value", ["\ud800", 2**70, object(), b"x"], ids=["surrogate", "big", "object", "bytes"])
def test_values_that_json_cannot_hold_are_an_invalid_request(value: object) -> None:
    request = GenerationRequest(model="m", messages=({"role": "user", "content": value},))
    with pytest.raises(InvalidRequest, match="JSON"):
        encode_request(request)


def test_fields_that_a_newer_version_added_to_a_known_format_are_ignored() -> None:
    request = GenerationRequest(model="tale", prompt="Once")
    value = json.loads(encode_request(request))
    value["novelty"] = value["sampling"]["novelty"] = 1
    assert decode_request(json.dumps(value)) == request
    event = TokenEvent(seq=1, text="x", state=JobState.FAILED, error=ErrorInfo(code="a", message="b"))
    value = json.loads(encode_event(event))
    value["novelty"] = value["e"]["novelty"] = 1
    assert decode_event(1, json.dumps(value)) == event
    card = ModelCard(
        name="tale", created=1, max_model_len=1, vocab_size=1, architecture="a", quantization="b", max_num_seqs=1,
        digest="c",
    )  # fmt: skip
    more = json.dumps({**json.loads(encode_card_more(card)), "novelty": 1})
    assert decode_card(encode_card(card), more) == card
    assert decode_card(encode_card(card)) == replace(card, digest="")


def test_a_request_has_the_first_format_while_workers_may_ignore_all_that_is_new_in_it() -> None:
    request = GenerationRequest(model="tale", prompt="Once")
    readers: dict[str, Any] = {
        "endpoint": "chat",
        "tool_parser": "hermes",
        "reply_options": {"echo": True},
        "grammar_field": "a",
    }
    for ignorable in (request, replace(request, **readers)):
        assert json.loads(encode_request(ignorable))["v"] == 1
    binding: dict[str, Any] = {
        "grammar": "start: /a/",
        "prompt_only": True,
        "truncate_prompt_tokens": 3,
        "suffix": "end",
    }
    later = [replace(request, **{name: value}) for name, value in binding.items()]
    later += [
        replace(request, sampling=sampling)
        for sampling in (SamplingParams(max_tokens=0), SamplingParams(bad_words=("a",)))
    ]
    for made in later:
        assert json.loads(encode_request(made))["v"] == 2
        assert decode_request(encode_request(made)) == made


def test_a_newer_format_has_its_own_error_and_older_ones_are_read() -> None:
    with pytest.raises(NewerFormat, match=r"format 3.*up to 2"):
        decode_event(1, b'{"v":3,"x":"a"}')
    for version in (1, 2):
        assert decode_event(1, f'{{"v":{version},"x":"a"}}').text == "a"
