"""From how many tokens on experts are decoded, by measured times."""

import pytest

from ktqueue.operators.gpu.experts.decoding import fewest_tokens


@pytest.mark.parametrize(
    ("seconds", "fewest"),
    [
        ({128: (1.0, 2.0), 256: (2.0, 2.1), 512: (4.0, 2.4), 1024: (8.0, 3.0)}, 512),
        ({128: (3.0, 2.0), 256: (2.0, 2.1), 512: (4.0, 2.4)}, 512),  # noise among few tokens
        ({128: (3.0, 2.0), 256: (4.0, 2.1)}, 128),
        ({128: (1.0, 2.0), 256: (2.0, 2.0)}, None),
        ({}, None),
    ],
)
def test_decoding_begins_where_it_is_faster_from_there_on(
    seconds: dict[int, tuple[float, float]], fewest: int | None
) -> None:
    assert fewest_tokens(seconds) == fewest
