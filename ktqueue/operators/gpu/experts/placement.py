"""Placement: which experts are in GPU memory. It moves those in that will probably be used most.

Nothing waits for it. Uses are counted on the device, and a copy of the counts is read some steps later. While an expert
is being copied to the GPU, the CPU still computes it. Without slots, it only counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.operators.gpu.copy_stream import CopyStream, Mark
from ktqueue.operators.gpu.experts.expected_uses import ExpectedUses, Uses
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.experts.use_order import UseOrder

READ_EVERY_STEPS = 16
RATE_HALF_LIFE = 128  # steps after which a use counts half in the hit rate


@dataclass(frozen=True, slots=True)
class _Move:
    """An expert to copy to the slot of `replaced`, which will probably be used less."""

    layer: int
    expert: int
    replaced: int


class Placement:
    """Moves experts of `layers` in and out of `pool`.

    counts: [layers, experts] int32 on the device; each step adds its uses. known_counts: the same on the host, some
    steps old; both wrap around. moves: number of experts moved in so far. expected: says which experts are worth a
    slot. order: learns the uses, too.
    uses, uses_on_gpu: of all steps that are known, and those whose expert was in GPU memory. observe: called with the
    uses [layers, experts] of each reading of the counts, the number of its steps, and whether one of them was long.
    max_moved_bytes: moved beside a step, since it is slower while the copies read memory. One expert always may.
    """

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        pool: ExpertPool,
        copies: CopyStream,
        *,
        expected: ExpectedUses | None = None,
        max_moved_bytes: int = 16 << 20,
    ) -> None:
        self._layers = layers
        self._max_moved_bytes = max_moved_bytes
        self._pool = pool
        self._copies = copies
        self.counts = torch.zeros(pool.host.shape, dtype=torch.int32, device=copies.device)
        self._read_counts = copies.host_buffer(pool.host.shape, torch.int32)
        self.known_counts = np.zeros(pool.host.shape, np.int32)
        per_token = [layer.experts_per_token for layer in layers]
        self.expected = expected or ExpectedUses(per_token, pool.host.shape[1])
        self.order = UseOrder([layer.experts for layer in layers], per_token, pool.is_absent())
        self._reading: Mark | None = None
        self._long_read = self._long_since = False  # whether a step was long: of the reading, and after it
        self._planned: list[_Move] = []  # the most useful last
        self._moving: list[tuple[_Move, int]] = []  # with the offset that the expert is copied to
        self._moved: Mark | None = None  # after the copies of `_moving`
        self._steps = self._steps_read = self._steps_learned = 0
        self._read_every = READ_EVERY_STEPS
        self._unlearned = np.zeros(pool.host.shape, np.int32)
        self.uses = self.uses_on_gpu = 0
        self.observe: Callable[[npt.NDArray[np.int32], int, bool], None] | None = None
        self._hits = self._uses = 0.0
        self.moves = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of recent uses whose expert was in GPU memory, from 0 to 1; None: not known yet."""
        return self._hits / self._uses if self._uses > 0 else None

    def read_each_step(self) -> None:
        """Read the counts after each step from now on. They are those of the step, or of the one before."""
        self._read_every = 1

    def place(self, uses: Uses) -> None:
        """Fill the slots with the experts that were used most in earlier runs, and count uses from now on.

        uses: [layers, experts]. Blocks until they are copied. Call it between two steps.
        """
        self._copies.finish()
        self._copies.wait_for(self._copies.mark_step())
        self._reading = self._moved = None
        self._long_since = False
        self._planned, self._moving = [], []
        for index, (layer, slots) in enumerate(zip(self._layers, self._pool.slots, strict=True)):
            table = self._pool.host[index, : layer.experts]
            wanted = (-uses[index, : layer.experts]).argsort(kind="stable")[:slots]
            free = sorted(set(self._pool.offsets_of_slots(index)) - set(table[wanted].tolist()))
            kept = np.full_like(table, ABSENT)
            kept[wanted] = table[wanted]
            for expert in wanted[table[wanted] == ABSENT].tolist():
                kept[expert] = free.pop(0)
                self._pool.upload(index, expert, int(kept[expert]))
            table[:] = kept
        self._pool.publish()
        self._copies.finish()
        self.counts.zero_()
        self.known_counts = np.zeros_like(self.known_counts)
        self._steps_read = self._steps_learned = self._steps
        self._unlearned[:] = 0
        self._hits = self._uses = 0.0
        self.expected.start(uses)
        self.order.start(uses)
        self.order.improve(self._pool.is_absent())

    def after_step(self, *, is_long: bool = False) -> None:
        """Publish experts that have arrived, read the counts, and start new copies. Call it between two steps.

        is_long: the step before had many tokens, so its uses are read at once.
        """
        self._steps += 1
        self._long_since |= is_long
        has_arrived = self._moved is not None and self._moved.passed()
        if has_arrived:
            self._end_moves()
        if self._reading is not None and self._reading.passed():
            self._reading = None
            self._count()
        if self._reading is None and (is_long or self._steps % self._read_every == 0):
            self._read_counts.copy_(self.counts, non_blocking=True)
            self._reading = self._copies.mark_step()
            self._long_read, self._long_since = self._long_since, False
        started = [] if self._moving else self._make_room()
        if has_arrived or started:
            self._pool.publish()
        if started:
            # Steps launched before this still read the slots. Steps launched from now on do not.
            self._copies.wait_for(self._copies.mark_step())
            for move, offset in started:
                self._pool.upload(move.layer, move.expert, offset)
            self._moving, self._moved = started, self._copies.mark()
            self.moves += len(started)

    def finish_moves(self) -> None:
        """Wait for the experts that are being copied, and publish them. So every slot has an expert. Call it between
        two steps."""
        if self._moving:
            self._copies.finish()
            self._end_moves()
            self._pool.publish()

    def _end_moves(self) -> None:
        """Enter the experts that have arrived into the host's table."""
        for move, offset in self._moving:
            self._pool.host[move.layer, move.expert] = offset
        self._moving, self._moved = [], None

    def _count(self) -> None:
        """Count the uses that have been read. What is worth a slot is learned from READ_EVERY_STEPS steps or more."""
        counts = self._read_counts.numpy()
        uses = counts - self.known_counts  # int32 wraps around, and so do the counts
        self.known_counts = counts.copy()
        steps, self._steps_read = self._steps - self._steps_read, self._steps
        found = int(uses[self._pool.host != ABSENT].sum())
        self.uses += int(uses.sum())
        self.uses_on_gpu += found
        decay = 0.5 ** (steps / RATE_HALF_LIFE)
        self._hits = self._hits * decay + found
        self._uses = self._uses * decay + float(uses.sum())
        if self.observe is not None:
            self.observe(uses, steps, self._long_read)
        self.order.learn(uses)
        if not any(self._pool.slots):
            return
        self._unlearned += uses
        if self._steps - self._steps_learned >= READ_EVERY_STEPS:
            self.expected.learn(self._unlearned, self._steps - self._steps_learned)
            self._unlearned[:] = 0
            self._steps_learned = self._steps
            self._planned = self._plan()

    def _plan(self) -> list[_Move]:
        """The moves that are worth it, the most useful last."""
        gains: list[tuple[float, int, int, int]] = []
        present = self._pool.host != ABSENT
        absent = ~present
        for move, _ in self._moving:
            absent[move.layer, move.expert] = False
        for index, layer in enumerate(self._layers):
            values = self.expected.values[index, : layer.experts]
            inside, outside = (np.flatnonzero(found[index, : layer.experts]) for found in (present, absent))
            coldest, hottest = inside[values[inside].argsort()], outside[(-values[outside]).argsort()]
            for cold, hot in zip(coldest.tolist(), hottest.tolist(), strict=False):
                if not self.expected.deserves(values[hot], values[cold]):
                    break
                gains.append((values[hot] - values[cold], index, hot, cold))
        return [_Move(*move) for _, *move in sorted(gains)]

    def _make_room(self) -> list[tuple[_Move, int]]:
        """Begin with the most useful of the planned moves, at most `max_moved_bytes` together: remove the replaced
        experts from the tables."""
        moves: list[tuple[_Move, int]] = []
        bytes_left = self._max_moved_bytes
        while self._planned:
            size = self._layers[self._planned[-1].layer].record.bytes
            if moves and size > bytes_left:
                break
            bytes_left -= size
            move = self._planned.pop()
            moves.append((move, int(self._pool.host[move.layer, move.replaced])))
            self._pool.host[move.layer, move.replaced] = ABSENT
        return moves
