"""The matches of a Lookup are those that a search of the whole sequence finds."""

import random

import numpy as np
import pytest

from ktqueue.engine.lookup import LONGEST, PLACES, Lookup

RATES = [0.5] * (LONGEST + 1)


def following(tokens: list[int], count: int) -> list[int]:
    """What followed the longest match of the end among the last places of its last pair, by search."""
    end, best, source = len(tokens) - 1, 0, 0
    places = [place for place in range(end - 1, 0, -1) if tokens[place - 1 : place + 1] == tokens[end - 1 :]]
    for place in places[:PLACES]:
        matched = next(
            (n for n in range(LONGEST, 2, -1) if n <= place + 1 and tokens[place + 1 - n : place + 1] == tokens[-n:]), 2
        )
        if matched > best:
            best, source = matched, place + 1
    if not best:
        return []
    copied = list(tokens)
    for ahead in range(count):
        copied.append(copied[source + ahead])
    return copied[len(tokens) :]


@pytest.mark.parametrize("size", [2, 3, 8, 50])
@pytest.mark.parametrize("known", [2, 3, 60])
def test_a_draft_is_what_followed_the_longest_match(size: int, known: int) -> None:
    """Whether the match was found in the prompt, or continues one that was right."""
    noise = random.Random(size + known)
    tokens = [noise.randrange(size) for _ in range(150)]
    array = np.array(tokens, dtype=np.int32)
    for length in range(known, 150):
        made = Lookup(array, length, RATES.copy())
        expected = following(tokens[:length], 9)
        assert (made.drafts(9) if made.chances(9) else []) == expected
    grown = Lookup(array, known, RATES.copy())
    for length in range(known, 150):
        grown.update(length)
        drafts = grown.drafts(9) if grown.chances(9) else []
        assert not drafts or tokens[length - 2 : length] + drafts[:1] in [
            tokens[at : at + 3] for at in range(length - 2)
        ]


def test_chances_follow_how_often_drafts_were_right() -> None:
    """They fall where tokens differ from the match and rise where they equal it. New sequences learn from others."""
    common = RATES.copy()
    repeating, changing = np.array(20 * [3, 1, 4, 1, 5], dtype=np.int32), np.arange(100, dtype=np.int32)
    changing[::3] = 7
    changing[1::3] = 8
    right, wrong = Lookup(repeating, 10, common), Lookup(changing, 10, common)
    before = right.chances(1)[0], wrong.chances(1)
    right.update(100)
    wrong.update(98)
    assert right.chances(1)[0] > 0.95 > before[0]
    assert not wrong.chances(1) and not before[1]
    wrong = Lookup(changing, 98, common)
    assert wrong.chances(1)[0] == common[2]
