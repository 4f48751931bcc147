"""The detokenizer gives the same text however tokens divide it: characters, stop strings, resumed choices."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ktqueue.engine.detokenizer import Detokenizer, StopStrings

PIECES = st.one_of(st.text(max_size=6).map(lambda text: text.encode()), st.binary(max_size=4))


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first. If several end there, the longest counts."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, minus_length = min(ends)
    return text[: end + minus_length], True


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool, Detokenizer]:
    detokenizer = Detokenizer(pieces.__getitem__, StopStrings(stops) if stops else None)
    out = []
    for token in range(len(pieces)):
        out.append(detokenizer.push(token))
        if detokenizer.stopped:
            return out, True, detokenizer
    out.append(detokenizer.finish())
    return out, detokenizer.stopped, detokenizer


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map(b"".join), st.lists(st.integers(0, 999), max_size=12))
@example("🜂é€x".encode(), list(range(11)))
@example(b"\xe2\x82", [1])
@example(b"\xf0\x9f\x98\xe2\x82\xac\xff", [1, 2, 3, 4, 5, 6])
def test_text_is_complete_however_its_tokens_arrive(data: Any, cuts: Any) -> None:
    out, _, detokenizer = run(pieces_of(data, cuts), [])
    assert "".join(out) == data.decode("utf-8", errors="replace")
    assert detokenizer.emitted == sum(map(len, out))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", "aab", "🜂"]), max_size=14).map("".join),
    st.lists(st.integers(0, 999), max_size=10),
    st.lists(st.text(alphabet="abé🜂", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example("ababac", [1, 2, 3, 4, 5], ["ababac"])
@example("aabaab", [3], ["abaac", "baab", "ab"])
def test_the_same_stop_string_is_found_however_tokens_arrive(text: Any, cuts: Any, stops: Any) -> None:
    pieces = pieces_of(text.encode(), cuts)
    out, stopped, _ = run(pieces, stops)
    assert ("".join(out), stopped) == reference(text, stops)


def test_every_stop_position_and_length() -> None:
    text = "Once upon a tïme, in a 🜂 wood, in a wood."
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            for size in (1, 3, 7):
                data = text.encode()
                pieces = [data[i : i + size] for i in range(0, len(data), size)]
                out, stopped, _ = run(pieces, [stop])
                assert stopped and "".join(out) == text[: text.find(stop)]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    out, _, _ = run([b"on", b"e E", b"N", b"x", b" EN", b"D"], ["END"])
    assert out == ["on", "e ", "", "ENx", " ", ""]


def test_text_that_is_decided_is_not_held_back() -> None:
    out, _, _ = run([b"a", b"b", b"c", b"d"], ["abX"])
    assert out == ["", "", "abc", "d", ""]


def test_incomplete_characters_wait_and_invalid_bytes_do_not() -> None:
    out, _, _ = run([b"\xe2", b"\x82", b"\xac", b"\xff", b"\xe2", b"a", b"\xf0\x9f"], [])
    assert out == ["", "", "€", "\ufffd", "", "\ufffda", "", "\ufffd"]


def test_a_stop_string_before_min_tokens_does_not_stop() -> None:
    pieces = [b"a", b"b", b"a", b"b", b"c"]
    detokenizer = Detokenizer(pieces.__getitem__, StopStrings(["ab"]))
    assert [detokenizer.push(0, may_stop=False), detokenizer.push(1, may_stop=False)] == ["", "ab"]
    assert [detokenizer.push(2, may_stop=False), detokenizer.push(3)] == ["", ""]
    assert detokenizer.stopped
    again = Detokenizer([b"aba", b"ba"].__getitem__, StopStrings(["aba"]))
    assert [again.push(0, may_stop=False), again.push(1)] == ["ab", ""] and again.stopped
    overlapping = Detokenizer([b"aba", b"ba"].__getitem__, StopStrings(["ababa", "aba"]))
    assert overlapping.push(0, may_stop=False) + overlapping.push(1) == ""
    assert overlapping.stopped, "the longest stop string that ends first wins, though it began before min_tokens"


@pytest.mark.parametrize("seed", range(20))
def test_resume_at_every_token(seed: int) -> None:
    noise = random.Random(seed)
    pieces = [noise.choice([b"a", b"b", b"ab", b"\xe2\x82", b"\xac", b"\xff", b"", b"c "]) for _ in range(25)]
    stops = ["abab", "bac", "€b"]
    undisturbed, stopped, _ = run(pieces, stops)
    for cut in range(len(pieces)):
        old = Detokenizer(pieces.__getitem__, StopStrings(stops))
        journaled = [old.push(token) for token in range(cut) if not old.stopped]
        if old.stopped:
            break
        new = Detokenizer(pieces.__getitem__, StopStrings(stops))
        for token in range(cut):
            new.push(token)
        assert new.emitted == sum(map(len, journaled))
        rest = []
        for token in range(cut, len(pieces)):
            rest.append(new.push(token))
            if new.stopped:
                break
        else:
            rest.append(new.finish())
        assert journaled + rest == undisturbed and new.stopped == stopped


def test_long_stop_strings_are_cheap() -> None:
    """With 16 stop strings of 1,024 characters that almost match, the work must not grow with their length."""
    import time

    stops = StopStrings(["a" * 1023 + chr(200 + i) for i in range(16)])
    detokenizer = Detokenizer([b"aaaa"].__getitem__, stops)
    began = time.process_time()
    for _ in range(2000):
        detokenizer.push(0)
    assert (time.process_time() - began) / 2000 < 1e-3
