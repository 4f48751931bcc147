"""What long steps leave for the CPU, by a routing trace: `python -m benchmarks.gpu.least_used TRACE.npz`.

The worker's own `UseOrder` learns the uses of some sequences. Then for each share of the experts that a step does not
copy, the part of the uses of other sequences is counted, and of the tokens with such a use.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.command import command_line
from benchmarks.results import write
from ktqueue.core.errors import CheckpointError
from ktqueue.loading.synthetic.routing import read_trace
from ktqueue.operators.gpu.experts.use_order import LEVELS, UseOrder

LEFT = (1, 2, 3, 4, 6, 8)  # sixteenths of the experts that are not copied
Choices = npt.NDArray[np.uint8]
"""[sequences, tokens, layers, experts a token]."""


def left(learned: list[Choices], measured: Choices, experts: int) -> list[dict[str, float]]:
    """What is left of the uses and tokens of `measured`, by the uses of `learned`."""
    layers, chosen = measured.shape[2:]
    absent = np.ones((layers, experts), bool)
    order = UseOrder([experts] * layers, [chosen] * layers, absent)
    counts = [
        [np.bincount(part[:, :, layer].ravel(), minlength=experts) for layer in range(layers)] for part in learned
    ]
    order.start(np.sum(counts, axis=0).astype(np.float64))
    order.improve(absent)
    figures = []
    for level in LEFT:
        on_cpu = np.ones((layers, experts), bool)
        for layer in range(layers):
            on_cpu[layer, order.first(layer, experts - experts * level // LEVELS, absent)] = False
        found = on_cpu[np.arange(layers)[:, None], measured]
        figures.append({"left": level / LEVELS, "uses": float(found.mean()), "tokens": float(found.any(-1).mean())})
    return figures


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("trace", type=Path, help="a .npz file of routing, with an array for each kind of text")
    arguments = parser.parse_args()
    try:
        kinds = read_trace(arguments.trace)
    except CheckpointError as error:
        parser.error(error.message)
    experts = 1 + max(int(kind.max()) for kind in kinds)
    halves = [(kind[: len(kind) // 2], kind[len(kind) // 2 :]) for kind in kinds]
    cases = {"same kinds": ([first for first, _ in halves], halves)}
    if len(kinds) > 1:
        cases["another kind"] = ([kinds[0]], halves[1:])
    points: dict[float, dict[str, Any]] = {}
    for name, (learned, measured) in cases.items():
        for figures in zip(*(left(learned, second, experts) for _, second in measured), strict=True):
            point = points.setdefault(figures[0]["left"], {"left": figures[0]["left"]})
            point[name] = {part: float(np.mean([figure[part] for figure in figures])) for part in ("uses", "tokens")}
    result: dict[str, Any] = {"format": 1, "figures": list(points.values())}
    path = arguments.results / "least-used.json"
    result["section"] = {
        "title": "What long steps leave for the CPU",
        "text": f"By a routing trace of {experts} experts in a layer. A step copies the experts that were used most in "
        "earlier texts, of the same kinds or of another. Left: the part of a layer's experts that it does not copy; "
        "then, of later texts, the part of the uses and of the tokens that need these. "
        "`python -m benchmarks.gpu.least_used TRACE.npz`",
        "words": 1,
        "columns": {
            "left": "{left:.1%}",
            **{f"{part}, {name}": f"{{{name}[{part}]:.1%}}" for name in cases for part in ("uses", "tokens")},
        },
    }
    write(path, result)


if __name__ == "__main__":
    main()
