"""How often experts are found in GPU memory, by a routing trace: `python -m benchmarks.gpu.placement TRACE.npz`.

The worker's own `Placement` moves experts of one byte in and out of a pool, on the CPU and without a model. Rows of
different sequences decode along the trace, each after a prompt of it. Half of the sequences are an earlier run, whose
uses a policy may know at the start. The other half are measured. Beside the worker's policy are others, which differ
in what they expect of an expert. One expert may move beside a step, as 16 MiB allow in a quarter of Qwen3-30B-A3B.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.command import command_line, integers
from benchmarks.results import GrowingResult
from ktqueue.core.errors import CheckpointError
from ktqueue.loading.synthetic.routing import read_trace
from ktqueue.operators.gpu.copy_stream import CopyStream
from ktqueue.operators.gpu.experts.expected_uses import HALF_LIFE_STEPS, ExpectedUses
from ktqueue.operators.gpu.experts.placement import Placement
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool

Numbers = npt.NDArray[np.int64]
PROMPT_TOKENS = 256  # of a sequence, at most half of it; the others are decoded
STEPS = {1: 12_000, 4: 4_000, 16: 1_600, 64: 800}
FIRST_STEPS = 200


class LongRun(ExpectedUses):
    """Frequency: all uses count alike."""

    def learn(self, uses: npt.NDArray[np.int32], steps: int) -> None:
        self._total = self._total + uses
        self.values = self._total

    def _estimate(self) -> None:
        self.values = self._total


class Decayed(LongRun):
    """LFU with decay: a use counts half after 4,096 tokens. This was the policy until November 2026."""

    def learn(self, uses: npt.NDArray[np.int32], steps: int) -> None:
        self._total = self._total * 0.5 ** (self._tokens(uses).mean() / 4096)
        super().learn(uses, steps)

    def deserves(self, hot: float, cold: float) -> bool:
        return hot > 1.25 * cold + 8


class Recent(LongRun):
    """Recent uses alone: a use counts half after HALF_LIFE_STEPS steps."""

    def learn(self, uses: npt.NDArray[np.int32], steps: int) -> None:
        self._total = self._total * 0.5 ** (steps / HALF_LIFE_STEPS)
        super().learn(uses, steps)


class LastUse(LongRun):
    """LRU: the last window of steps with a use. Among equals, the expert with more uses in it."""

    windows = 0

    def learn(self, uses: npt.NDArray[np.int32], steps: int) -> None:
        self.windows += 1
        self.values = np.where(uses > 0, self.windows + uses / 1e6, self.values)

    def deserves(self, hot: float, cold: float) -> bool:
        return hot > cold + 0.5


POLICIES: dict[str, tuple[type[ExpectedUses], bool]] = {  # whether the uses of an earlier run are known
    "lfu with decay": (Decayed, False),
    "lru": (LastUse, False),
    "frequency": (LongRun, False),
    "frequency, known": (LongRun, True),
    "recent": (Recent, False),
    "both": (ExpectedUses, False),
    "both, known": (ExpectedUses, True),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Experts that tokens chose: sequences of [tokens, layers, chosen], of an earlier run and to be measured."""

    earlier: list[Numbers]
    measured: list[Numbers]
    experts: int

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Read a file and divide its sequences by chance. Raises CheckpointError."""
        sequences = [sequence.astype(np.int64) for array in read_trace(path) for sequence in array]
        if len(sequences) < 2:
            raise CheckpointError(f"{path}: two sequences are needed, one of them as an earlier run; it has one")
        order = np.random.default_rng(1).permutation(len(sequences))
        half = len(order) // 2
        earlier, measured = ([sequences[i] for i in part] for part in (order[:half], order[half:]))
        return cls(earlier, measured, 1 + max(int(sequence.max()) for sequence in sequences))

    def uses(self) -> npt.NDArray[np.float64]:
        """How often the earlier run used each expert: [layers, experts]."""
        layers = self.earlier[0].shape[1]
        flat = np.concatenate([_flat(sequence, self.experts) for sequence in self.earlier])
        return np.bincount(flat, minlength=layers * self.experts).reshape(layers, -1).astype(np.float64)

    def steps(self, rows: int, count: int) -> Iterator[tuple[Numbers, Numbers]]:
        """What each step uses of all experts, one after the other: by rows that decode, and by prompts beside them."""
        draw = np.random.default_rng(rows)
        waiting: list[Numbers] = []

        def next_sequence() -> Numbers:
            if not waiting:
                waiting.extend(self.measured[i] for i in draw.permutation(len(self.measured)))
            return waiting.pop()

        sequences = [next_sequence() for _ in range(rows)]
        places = [int(draw.integers(_prompt_tokens(sequence), len(sequence))) for sequence in sequences]
        for _ in range(count):
            prompts: list[Numbers] = []
            for row in range(rows):
                if places[row] == len(sequences[row]):
                    sequences[row] = next_sequence()
                    places[row] = _prompt_tokens(sequences[row])
                    prompts.append(sequences[row][: places[row]])
            decoded = np.stack([sequence[place] for sequence, place in zip(sequences, places, strict=True)])
            places = [place + 1 for place in places]
            prompt = np.concatenate(prompts) if prompts else np.zeros((0, *decoded.shape[1:]), np.int64)
            yield _flat(decoded, self.experts), _flat(prompt, self.experts)


def _prompt_tokens(sequence: Numbers) -> int:
    return min(PROMPT_TOKENS, len(sequence) // 2)


def _flat(choices: Numbers, experts: int) -> Numbers:
    """Numbers of the experts [tokens, layers, chosen] among those of all layers."""
    return (choices + np.arange(choices.shape[1])[:, None] * experts).reshape(-1)


class _OneByte:
    """Packed experts of one byte."""

    def __init__(self, experts: int) -> None:
        self._data = np.zeros(experts, np.uint8)

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        return [(self._data.ctypes.data + expert, 1)]


def simulate(trace: Trace, policy: str, *, rows: int, room: float, steps: int) -> dict[str, Any]:
    """Run steps with room for a part of each layer's experts. The first half of them only warms up."""
    kind, is_known = POLICIES[policy]
    uses, layers, chosen = trace.uses(), *trace.measured[0].shape[1:]
    packed = _OneByte(trace.experts)
    routed: Any = [
        SimpleNamespace(packed=packed, record=SimpleNamespace(bytes=1), experts=trace.experts, experts_per_token=chosen)
    ] * layers
    copies = CopyStream("cpu")
    pool = ExpertPool(routed, [int(room * trace.experts)] * layers, 0, copies)
    placement = Placement(routed, pool, copies, expected=kind([chosen] * layers, trace.experts), max_moved_bytes=1)
    if is_known:
        placement.place(uses)
    counts = placement.counts.numpy().reshape(-1)
    table, all_experts = pool.host.reshape(-1), pool.host.size
    found = np.zeros((2, 2))  # in the first steps and in the last half: uses, and those in GPU memory
    missing = moved_before = 0
    for number, (decoded, prompts) in enumerate(trace.steps(rows, steps)):
        part = 0 if number < FIRST_STEPS else 1 if 2 * number >= steps else None
        if part is not None:
            found[part] += len(decoded), (table[decoded] != ABSENT).sum()
        if part == 1:
            used = np.unique(decoded)
            missing += int((table[used] == ABSENT).sum())
        elif number + 1 == steps // 2:
            moved_before = placement.moves
        counts += np.bincount(np.concatenate((decoded, prompts)), minlength=all_experts).astype(np.int32)
        placement.after_step()
    return {
        "rows": rows,
        "room": room,
        "policy": policy,
        "found": float(found[1, 1] / found[1, 0]),
        "found_first": float(found[0, 1] / found[0, 0]),
        "missing": missing / (steps - steps // 2) / layers,
        "moves": 100 * (placement.moves - moved_before) / (steps - steps // 2),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("trace", type=Path, help="a .npz file of routing")
    parser.add_argument("--rows", type=integers, default="1,4,16,64", help="sequences that decode at once")
    parser.add_argument("--room", type=integers, help="experts of a layer in GPU memory (default: 1/8, 1/4 and 1/2)")
    arguments = parser.parse_args()
    try:
        trace = Trace.read(arguments.trace)
    except CheckpointError as error:
        parser.error(error.message)
    rooms = arguments.room or [trace.experts // part for part in (8, 4, 2)]
    if max(rooms) > trace.experts:
        parser.error(f"--room must be at most {trace.experts}, the experts of a layer, got {max(rooms)}")
    result = GrowingResult(
        arguments.results / "placement.json",
        experts=trace.experts,
        layers=trace.measured[0].shape[1],
        prompt_tokens=PROMPT_TOKENS,
        first_steps=FIRST_STEPS,
    )
    begun = time.monotonic()
    for rows in arguments.rows:
        for room in rooms:
            for policy in POLICIES:
                share, steps = room / trace.experts, STEPS.get(rows, 1_000)
                result.values["seconds"] = time.monotonic() - begun
                result.add(simulate(trace, policy, rows=rows, room=share, steps=steps))


if __name__ == "__main__":
    main()
