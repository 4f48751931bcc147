"""Some tokens times a matrix in few panels, by clusters of programs: how panel_clusters.cu is launched.

A multiprocessor has hardly more than one panel of such a matrix, such as o of attention. So what it waits for is x, of
which each program would read all columns. The programs of a cluster share out the columns instead (ADR 0088).
panel_tensor_cores.py has the product. Clusters are in GPUs of compute capability 9.0 or later.
"""

from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "multiply_by_clusters"
FEWEST_TOKENS, MOST_TOKENS = 5, 16
_MOST_PANELS = 132
"""One for each multiprocessor of an H200."""
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 16


class ClusterTile(NamedTuple):
    """Warps of a program, programs of a cluster, panels of a cluster, and superblocks that a warp decodes before it
    waits for the kernel before. A warp has one or two superblocks."""

    warps: int
    programs: int
    group: int
    early: int

    def grid(self, panels: int) -> int:
        """The number of programs for so many panels."""
        return -(-panels // self.group) * self.programs

    def shared_bytes(self, blocks: int, slot_bytes: int, panel_floats: int, square_floats: int) -> int:
        """Shared memory of a program for panels of so many superblocks, each in a slot. panel_floats: sums of a panel,
        for each of its superblocks; square_floats: of x, also for each."""
        units = -(-(-(-blocks // self.programs) * self.group) // self.warps)
        kept = -(-self.group // self.programs)
        return self.warps * units * slot_bytes + 4 * blocks * (kept * panel_floats + square_floats)


def tile_of(blocks: int, panels: int, tokens: int) -> ClusterTile | None:
    """The tile for a matrix of so many panels, each of so many superblocks. None: another kernel is faster."""
    small = panels <= _MOST_PANELS and _FEWEST_BLOCKS <= blocks <= _MOST_BLOCKS
    if not small or not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        return None
    return ClusterTile(8, 2, 2, 1) if blocks == _MOST_BLOCKS else ClusterTile(4, 2, 1, 1)
