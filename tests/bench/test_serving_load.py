"""The parts of `ktqueue bench serve`: event streams, percentiles, arrivals, traces, prompts of a wanted length."""

import asyncio
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from ktqueue.bench.serving.distribution import PRECISION, Distribution
from ktqueue.bench.serving.event_stream import MAX_EVENT_BYTES, EventStream
from ktqueue.bench.serving.http_client import Address, RequestFailure
from ktqueue.bench.serving.traces import Arrival, read_trace
from ktqueue.bench.serving.words import WORDS, Words, calibrate
from ktqueue.bench.serving.workload import (
    DatasetName,
    RandomLengths,
    arrivals,
    random_requests,
    read_samples,
    trace_requests,
)
from ktqueue.core.errors import InvalidRequest

STREAM = (
    b"\xef\xbb\xbf: a comment\rdata: 1\r\rdata:2\n\nevent: x\r\ndata: 3\r\nid: 7\r\ndata:  4\r\n\r\n"
    b"retry: 5\n\n:\n\ndata\n\ndata: \xf0\x9f\xa6\x8a\n\ndata: never ended\n"
)
DATA = [b"1", b"2", b"3\n 4", b"", "\N{FOX FACE}".encode()]


def test_an_event_stream_is_read_alike_in_any_pieces() -> None:
    splits = [[STREAM[:at], STREAM[at:]] for at in range(len(STREAM) + 1)]
    for pieces in [*splits, [STREAM[at : at + 1] for at in range(len(STREAM))]]:
        stream = EventStream()
        assert [data for piece in pieces for data in stream.feed(piece)] == DATA, pieces
    stream, piece = EventStream(), b"x" * (1 << 20)
    with pytest.raises(ValueError, match="an event has more than"):
        for _ in range((MAX_EVENT_BYTES >> 20) + 1):
            list(stream.feed(piece))


def test_percentiles_are_those_of_all_values() -> None:
    draw, times = random.Random(3), Distribution()
    values = sorted(draw.lognormvariate(-3, 2) for _ in range(20_000))
    times.extend(values)
    for percent in (1, 50, 90, 99, 99.9, 100):
        exact = values[max(0, math.ceil(len(values) * percent / 100) - 1)]
        assert times.percentile(percent) == pytest.approx(exact, rel=PRECISION)
    assert times.mean == pytest.approx(sum(values) / len(values))
    assert math.isnan(Distribution().percentile(50))


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    assert list(arrivals(3, math.inf, 1.0, "s")) == [0.0, 0.0, 0.0]
    spread = {}
    for burstiness in (0.25, 1.0, 4.0):
        moments = arrivals(4000, 50.0, burstiness, "s")
        assert moments[-1] == pytest.approx(4000 / 50)
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        mean = sum(gaps) / len(gaps)
        spread[burstiness] = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    assert spread == pytest.approx({0.25: 2.0, 1.0: 1.0, 4.0: 0.5}, rel=0.15)  # 1 / sqrt(shape)
    assert arrivals(9, 5.0, 1.0, "s") == arrivals(9, 5.0, 1.0, "s") != arrivals(9, 5.0, 1.0, "t")


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9305900,396,109\n2023-11-16 18:15:51,9,0\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.5,GPT-4,374,44,418,API log\n9.75,GPT-4,396,109,505,API log\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
    '{"timestamp": 4250, "input_length": 396, "output_length": 109, "hash_ids": [0]}\n',
    "bailian.jsonl": '{"chat_id": 1, "timestamp": 61.5, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
    '{"chat_id": 2, "timestamp": 65.75, "input_length": 396, "output_length": 109, "hash_ids": [0, 4]}\n',
}


def test_traces_of_four_kinds_are_read(tmp_path: Path) -> None:
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text)
        first, second = read_trace(tmp_path / name, 9)
        assert (first.seconds, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
        assert (second.input_tokens, second.output_tokens) == (396, 109)
        assert second.seconds == pytest.approx(4.25, abs=1e-5)
        assert len(read_trace(tmp_path / name, 1)) == 1
    assert (second.blocks, second.block_tokens) == ((0, 4), 16)
    for line, says in {
        "x,y\n1,2\n": "bad.csv:2: timestamp must be",
        "timestamp,request_tokens\n1,2\n": "bad.csv:2: has none of the columns outputlength",
        "timestamp,input_length,output_length\nnan,2,3\n": "must be finite, got 'nan'",
        "timestamp,input_length,output_length\n1,-2,3\n": "bad.csv:2: inputlength must be a number of tokens, got '-2'",
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": "x"}': "hash_ids must be a list",
        "{]\n": "bad.csv:1: not JSON",
        "": "has no request with output",
    }.items():
        (tmp_path / "bad.csv").write_text(line)
        with pytest.raises(InvalidRequest, match=says):
            read_trace(tmp_path / "bad.csv", 9)


def letters(text: str) -> int:
    """A tokenizer with a token for each letter."""
    return len(text.replace(" ", ""))


def test_prompts_have_the_wanted_tokens_and_no_common_beginning() -> None:
    async def ask(prompt: str) -> int:
        if len(prompt) > 2000:
            raise RequestFailure("HTTP 400", "too long")
        return letters(prompt) + 7

    words = asyncio.run(calibrate(ask, 300, "s"))
    assert words.overhead == pytest.approx(7, abs=1)
    mean_letters = sum(map(letters, WORDS)) / len(WORDS)
    assert words.per_word == pytest.approx(mean_letters, rel=0.1)  # of 300 words, since the server refuses all
    exact = asyncio.run(calibrate(ask, 300, "s", letters))
    lengths = RandomLengths(200, 30, prefix_len=50, range_ratio=0.5)
    plain, counted = ([*random_requests([0.0] * 50, lengths, by, "s")] for by in (words, exact))
    mean = sum(letters(request.prompt) + 7 for request in plain) / 50
    assert mean == pytest.approx(sum(request.prompt_tokens for request in plain) / 50, rel=0.1)
    assert {request.prompt_tokens for request in counted} <= set(range(150, 351))
    for request in counted:
        assert abs(letters(request.prompt) + 7 - request.prompt_tokens) <= 8  # the longest word
        assert 15 <= request.max_tokens <= 45
    assert len({request.prompt[:50] for request in counted}) == 1 < len({request.prompt[:90] for request in counted})
    assert (
        [*random_requests([0.0] * 50, lengths, words, "s")]
        == plain
        != [*random_requests([0.0] * 50, lengths, words, "t")]
    )


def test_prompts_of_a_trace_share_its_blocks() -> None:
    words = Words(per_word=1.0)
    trace = [Arrival(at, 40, 5, blocks, 16) for at, blocks in enumerate([(1, 2, 3), (1, 2, 3), (1, 5, 6), (4, 2)])]
    requests = [*trace_requests(trace, 2.0, words, "s")]
    assert [request.at for request in requests] == [0.0, 0.5, 1.0, 1.5]
    texts = [request.prompt.split() for request in requests]
    assert [len(text) for text in texts] == [40] * 4
    assert texts[0][:32] == texts[1][:32] != texts[2][:32]  # a third block would leave no token of its own
    assert texts[0][:16] == texts[2][:16] != texts[3][:16]
    assert texts[0][32:] != texts[1][32:]


def test_files_of_prompts_are_read(tmp_path: Path) -> None:
    words, custom, shared = Words(), tmp_path / "custom.jsonl", tmp_path / "sharegpt.json"
    custom.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n')
    assert read_samples(DatasetName.CUSTOM, custom, 9, words, "s") == [("a", 3), ("b", 256)]
    assert read_samples(DatasetName.CUSTOM, custom, 1, words, "s", 5) == [("a", 5)]
    turns = [{"from": "human", "value": "q" * 80}, {"from": "gpt", "value": "a" * 40}]
    long = [{"from": "human", "value": "q" * 8000}, turns[1]]
    shared.write_text(f'[{{"conversations": {turns}}}, {{"conversations": {long}}}, {{}}]'.replace("'", '"'))
    assert read_samples(DatasetName.SHAREGPT, shared, 9, words, "s") == [("q" * 80, 10)]  # four characters a token
    for text, says in {
        '{"text": "a"}': "custom.jsonl:1: must be",
        '{"prompt": "a", "output_tokens": 0}': "at least 1",
    }.items():
        custom.write_text(text)
        with pytest.raises(InvalidRequest, match=says):
            read_samples(DatasetName.CUSTOM, custom, 9, words, "s")


def test_urls_are_read_with_and_without_v1() -> None:
    assert str(Address.parse("localhost:9")) == str(Address.parse("http://localhost:9/v1/")) == "http://localhost:9"
    assert str(Address.parse("https://[::1]/proxy/v1")) == "https://[::1]:443/proxy"
    for url in ("ftp://a", "http://", "http://user:word@a", "http://a?b=1"):
        with pytest.raises(ValueError, match="must"):
            Address.parse(url)
