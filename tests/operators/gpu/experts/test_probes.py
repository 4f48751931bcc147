"""The choice of a share from measured times. The measurement itself needs a GPU."""

import pytest

from ktqueue.operators.gpu.experts.probes import fastest


@pytest.mark.parametrize(
    ("relative", "share"),
    [
        ({0.0: 1.0, 0.25: 0.85, 0.5: 1.6}, 0.25),
        ({0.0: 1.0, 0.125: 0.98, 0.25: 1.1}, 0.0),
        ({0.0: 1.0, 0.125: 0.94, 0.1875: 0.93, 0.25: 1.1}, 0.1875),
    ],
)
def test_the_fastest_share_is_chosen_if_it_gains_enough(relative: dict[float, float], share: float) -> None:
    assert fastest(relative) == share
