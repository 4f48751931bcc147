"""Placement: which experts are in GPU memory. It learns from recent steps which experts are used most.

Nothing waits for it. Uses are counted on the device, and a copy of the counts is read some steps later. While an expert
is being copied to the GPU, the CPU still computes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ktqueue.operators.gpu.copy_stream import CopyStream, Mark
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer

READ_EVERY_STEPS = 16
HALF_LIFE_TOKENS = 4096  # after this number of tokens a use counts half
MIN_RATIO, MIN_MARGIN = 1.25, 8  # an expert replaces another if its uses exceed RATIO times the other's plus MARGIN


@dataclass(frozen=True, slots=True)
class _Move:
    """An expert to copy to `offset`, the slot of an expert that is used less."""

    layer: int
    expert: int
    offset: int


class Placement:
    """Moves experts of `layers` in and out of `pool`.

    counts: [layers, experts] int32 on the device; each step adds its uses. known_counts: the same on the host, some
    steps old; both wrap around. moves: number of experts moved in so far.
    max_moved_bytes: moved at a time, since steps are slower while the copies read memory.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, *, max_moved_bytes: int = 64 << 20
    ) -> None:
        self._layers = layers
        self._max_moved_bytes = max_moved_bytes
        self._pool = pool
        self._copies = copies
        self.counts = torch.zeros(pool.host.shape, dtype=torch.int32, device=copies.device)
        self._read_counts = copies.host_buffer(pool.host.shape, torch.int32)
        self.known_counts = np.zeros(pool.host.shape, np.int32)
        self._scores = np.zeros(pool.host.shape)  # uses, with less weight for older ones
        self._reading: Mark | None = None
        self._moving: list[_Move] = []
        self._moved: Mark | None = None  # after the copies of `_moving`
        self._steps = 0
        self._hits = self._uses = 0.0
        self.moves = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of recent uses whose expert was in GPU memory, from 0 to 1; None: not known yet."""
        return self._hits / self._uses if self._uses > 0 else None

    def after_step(self) -> None:
        """Publish experts that have arrived, read the counts, and start new copies. Call it between two steps."""
        self._steps += 1
        arrived: list[_Move] = []
        if self._moved is not None and self._moved.passed():
            arrived, self._moving, self._moved = self._moving, [], None
        for move in arrived:
            self._pool.host[move.layer, move.expert] = move.offset
        moves: list[_Move] = []
        if self._reading is not None and self._reading.passed():
            self._reading = None
            self._learn()
            moves = [] if self._moving else self._make_room()
        elif self._reading is None and self._steps % READ_EVERY_STEPS == 0:
            self._read_counts.copy_(self.counts, non_blocking=True)
            self._reading = self._copies.mark_step()
        if arrived or moves:
            self._pool.publish()
        if moves:
            # Steps launched before this still read the slots. Steps launched from now on do not.
            self._copies.wait_for(self._copies.mark_step())
            for move in moves:
                self._pool.upload(move.layer, move.expert, move.offset)
            self._moving, self._moved = moves, self._copies.mark()
            self.moves += len(moves)

    def _learn(self) -> None:
        """Update scores and hit rate from the counts that have been read."""
        counts = self._read_counts.numpy()
        uses = counts - self.known_counts  # int32 wraps around, and so do the counts
        self.known_counts = counts.copy()
        tokens = uses.sum() / sum(layer.experts_per_token for layer in self._layers)
        decay = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._scores = self._scores * decay + uses
        self._hits = self._hits * decay + float(uses[self._pool.host != ABSENT].sum())
        self._uses = self._uses * decay + float(uses.sum())

    def _make_room(self) -> list[_Move]:
        """Remove rarely used experts from the tables and return the moves that replace them, the most useful first,
        at most `max_moved_bytes` together."""
        gains: list[tuple[float, int, int, int]] = []
        for index, layer in enumerate(self._layers):
            scores, resident = self._scores[index, : layer.experts], self._pool.host[index, : layer.experts] != ABSENT
            inside, outside = np.flatnonzero(resident), np.flatnonzero(~resident)
            coldest, hottest = inside[scores[inside].argsort()], outside[(-scores[outside]).argsort()]
            for cold, hot in zip(coldest.tolist(), hottest.tolist(), strict=False):
                if scores[hot] <= MIN_RATIO * scores[cold] + MIN_MARGIN:
                    break
                gains.append((scores[hot] - scores[cold], index, cold, hot))
        moves: list[_Move] = []
        bytes_left = self._max_moved_bytes
        for _, index, cold, hot in sorted(gains, reverse=True):
            size = self._layers[index].record.bytes
            if moves and size > bytes_left:
                break
            bytes_left -= size
            moves.append(_Move(index, hot, int(self._pool.host[index, cold])))
            self._pool.host[index, cold] = ABSENT
        return moves
