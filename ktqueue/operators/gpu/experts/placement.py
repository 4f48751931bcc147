"""Placement: which experts live in GPU memory. Those that were used most of late, learned while the steps run.

Nothing waits: uses are counted on the device, read one step and looked at another; an expert that moves is the CPU's
until its copy has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ktqueue.operators.gpu.copy_stream import CopyStream, Mark
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer

READ_EVERY = 16  # steps
HALF_LIFE = 4096  # tokens after which a use counts half
BETTER = 1.25  # an expert moves in if it was used so many times as often as the one that makes room,
USES = 8  # and by so many uses more: counts of few tokens say little
MOST_BYTES = 64 << 20  # moved at a time; a step is slower while memory is read for the copy


@dataclass(frozen=True, slots=True)
class _Arrival:
    """An expert on its way to `offset`; there when `mark` is passed."""

    layer: int
    expert: int
    offset: int
    mark: Mark


class Placement:
    """Moves experts of `layers` in and out of `pool`.

    counts: [layers, experts] int32 on the device, to which steps add their uses. hit_rate: share of late uses that
    found their expert on the GPU; None: nothing is known yet. moves: experts that came in since the start.
    """

    def __init__(self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream) -> None:
        self._layers = layers
        self._pool = pool
        self._copies = copies
        self.counts = torch.zeros(pool.host.shape, dtype=torch.int32, device=copies.device)
        self._read = copies.host_buffer(pool.host.shape, torch.int32)
        self._seen = np.zeros(pool.host.shape, np.int32)
        self._scores = np.zeros(pool.host.shape)  # uses, older ones counting less
        self._reading: Mark | None = None
        self._arrivals: list[_Arrival] = []
        self._steps = 0
        self._hits = self._uses = 0.0
        self.moves = 0

    @property
    def hit_rate(self) -> float | None:
        """See above; from 0 to 1."""
        return self._hits / self._uses if self._uses > 0 else None

    def after_step(self) -> None:
        """To be called between steps: takes in what has arrived, looks at counts, sends experts on their way."""
        self._steps += 1
        arrived = [one for one in self._arrivals if one.mark.passed()]
        for one in arrived:
            self._pool.host[one.layer, one.expert] = one.offset
        self._arrivals = [one for one in self._arrivals if one not in arrived]
        moves: list[tuple[int, int, int]] = []
        if self._reading is not None and self._reading.passed():
            self._reading = None
            self._learn()
            moves = [] if self._arrivals else self._make_room()
        elif self._reading is None and self._steps % READ_EVERY == 0:
            self._read.copy_(self.counts, non_blocking=True)
            self._reading = self._copies.here()
        if arrived or moves:
            self._pool.publish()
        if moves:
            # Steps that were launched before still read the slots; those launched from now on do not.
            self._copies.after(self._copies.here())
            for layer, expert, offset in moves:
                self._pool.upload(layer, expert, offset)
            there = self._copies.mark()
            self._arrivals = [_Arrival(*move, there) for move in moves]
            self.moves += len(moves)

    def _learn(self) -> None:
        """Take in the counts that have been read."""
        counts = self._read.numpy()
        uses = counts - self._seen  # wraps round as the counts do
        self._seen = counts.copy()
        tokens = uses.sum() / sum(layer.experts_per_token for layer in self._layers)
        kept = 0.5 ** (tokens / HALF_LIFE)
        self._scores = self._scores * kept + uses
        self._hits = self._hits * kept + float(uses[self._pool.host != ABSENT].sum())
        self._uses = self._uses * kept + float(uses.sum())

    def _make_room(self) -> list[tuple[int, int, int]]:
        """Take cold experts out of the tables for hotter ones: (layer, expert that comes, its offset), the most useful
        first, MOST_BYTES at most."""
        gains: list[tuple[float, int, int, int]] = []
        for index, layer in enumerate(self._layers):
            scores, resident = self._scores[index, : layer.experts], self._pool.host[index, : layer.experts] != ABSENT
            inside, outside = np.flatnonzero(resident), np.flatnonzero(~resident)
            coldest, hottest = inside[scores[inside].argsort()], outside[(-scores[outside]).argsort()]
            for cold, hot in zip(coldest.tolist(), hottest.tolist(), strict=False):
                if scores[hot] <= BETTER * scores[cold] + USES:
                    break
                gains.append((scores[hot] - scores[cold], index, cold, hot))
        moves: list[tuple[int, int, int]] = []
        left = MOST_BYTES
        for _, index, cold, hot in sorted(gains, reverse=True):
            size = self._layers[index].record.bytes
            if moves and size > left:
                break
            left -= size
            moves.append((index, hot, int(self._pool.host[index, cold])))
            self._pool.host[index, cold] = ABSENT
        return moves
