"""The tiles of products with packed experts: which kernel computes a step, and what one of its programs holds.

Every choice is in TILES, by the pairs (of a token and an expert) that an expert has on average. Figures for other
choices: `python -m benchmarks.gpu.expert_tiles`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

INFINITE = float("inf")
SMALLEST_LIMIT = 32
"""Pairs of a step that have programs of their own however few experts there are."""
Choice = TypeVar("Choice")


class DotTile(NamedTuple):
    """The part of a matrix that a program of expert_int8.py holds at once: `slabs` by `rows`."""

    slabs: int
    rows: int
    stages: int = 0
    """Stages of copies to shared memory before their use. 0: weights are loaded when they are used."""
    registers: int = 128
    """Largest number per thread."""
    warp_rows: int = 16
    """Rows of a warp, which has 8 slabs of them. Of 16, a thread has a slab's words of four rows."""

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return self.slabs * self.rows // (8 * self.warp_rows)


class DotTiles(NamedTuple):
    """Both products of expert_int8.py. Other tiles add in another order."""

    pairs: int
    """That a program multiplies at once by weights that it has decoded. More of an expert's pairs decode them again."""
    gate_up: DotTile
    down: DotTile
    skips: bool = False
    """Whether a program branches around pairs that an expert does not have; otherwise it computes them in vain."""


class EarlyPairs(NamedTuple):
    """Pairs up to which weights are requested early. of_one: of a step of one token, those of gate and up; of_several:
    those of down."""

    of_one: int
    of_several: int


class CoreTile(NamedTuple):
    """Both products of expert_tensor_cores.py."""

    pairs: int
    """Of an expert, that a program multiplies by weights that it has decoded. At least 16."""
    rows: int
    """Of weights, gate and up together."""
    stages: int
    warps: int
    permuted: bool
    """Whether a launch before brings the columns of x into the order of packed weights."""


class MatrixTile(NamedTuple):
    """A product of expert_matrices.py. Each of a program's `warps` has two panels of 16 rows at a time."""

    pairs: int
    """Of an expert that are multiplied at once, a multiple of 8. Further pairs read the weights again."""
    warps: int
    """Even for gate and up."""
    stages: int = 2
    """Superblocks of each of a warp's panels in shared memory. All but one are on their way."""
    has_runs: bool = True
    """Whether as many programs begin as fit, each with a run of work. Otherwise each expert has programs of its own."""

    @property
    def reads_once(self) -> bool:
        """Whether few experts have so many pairs that they are read again. Then they leave the L2 cache first."""
        return self.pairs <= 8


class MatrixTiles(NamedTuple):
    """Both products of expert_matrices.py."""

    gate_up: MatrixTile
    down: MatrixTile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """All choices for products with packed experts. `own`, `matrices` and `cores` are lists of a limit and the choice
    below it.

    few_pairs: average pairs of an expert up to which the integer kernel is used, where that for matrices is not.
    own_pairs: pairs of a step up to which each has programs of its own, if there are experts enough: see `own_limit`.
    early_pairs: pairs up to which expert_few_pairs.py computes steps whose pairs have programs of their own. None: it
    computes none.
    own: their tiles, by pairs of the step. dots: the tiles of more pairs. matrices, cores: by average pairs of an
    expert. scanned_pairs: pairs of a step up to which programs on tensor cores find their pairs by themselves, at most
    512; for more, pairs are sorted first.
    """

    few_pairs: float
    own_pairs: int
    early_pairs: EarlyPairs | None
    own: Sequence[tuple[float, DotTiles]]
    dots: DotTiles
    matrices: Sequence[tuple[float, MatrixTiles | None]]
    cores: Sequence[tuple[float, CoreTile]]
    scanned_pairs: int

    def own_limit(self, experts: int) -> int:
        """Pairs of a step up to which each has programs of its own: half as many as experts, or SMALLEST_LIMIT.

        With more pairs of an expert, each would decode weights that others decode too.
        """
        return min(self.own_pairs, max(SMALLEST_LIMIT, experts // 2))

    def matrix_tiles(self, pairs: int, experts: int) -> MatrixTiles | None:
        """The tiles of the int8 kernel on tensor cores for a step of `pairs` pairs. None: another kernel is faster."""
        return _below(self.matrices, pairs / experts)

    def dot_tiles(self, pairs: int, *, are_sorted: bool) -> DotTiles:
        """The tiles of the integer kernel for a step of `pairs` pairs."""
        return self.dots if are_sorted else _below(self.own, pairs)

    def core_tile(self, pairs: int, experts: int, *, is_float32: bool, has_float32: bool) -> CoreTile:
        """The tile on tensor cores for a step of `pairs` pairs.

        is_float32: activations are float32; has_float32: weights are. Their tiles must be smaller to fit into shared
        memory.
        """
        tile = _below(self.cores, 0 if pairs <= self.scanned_pairs else pairs / experts)
        if is_float32:
            return tile._replace(pairs=min(tile.pairs, 32), rows=min(tile.rows, 64), stages=2, warps=4)
        if has_float32:
            return tile._replace(pairs=min(tile.pairs, 64), stages=2, warps=4)
        return tile


def _below(choices: Sequence[tuple[float, Choice]], value: float) -> Choice:
    return next(choice for limit, choice in choices if value < limit)


_LARGE = DotTile(slabs=32, rows=32), DotTile(slabs=8, rows=64)
_SMALL = DotTile(slabs=16, rows=32), DotTile(slabs=8, rows=32)

TILES = ExpertTiles(
    few_pairs=12,
    own_pairs=64,  # a weight that two of them read comes from the cache
    early_pairs=EarlyPairs(of_one=11, of_several=32),
    # Between one row of 8 pairs and four rows, nothing was measured.
    own=((12, DotTiles(1, *_LARGE)), (INFINITE, DotTiles(1, *_SMALL))),
    dots=DotTiles(2, *_SMALL),
    matrices=(
        (0.75, None),
        (3.5, MatrixTiles(MatrixTile(8, warps=8, has_runs=False), MatrixTile(8, warps=4))),
        (6, MatrixTiles(MatrixTile(8, warps=8), MatrixTile(8, warps=4))),
        (12, MatrixTiles(MatrixTile(16, warps=16), MatrixTile(16, warps=12))),
        (22, MatrixTiles(MatrixTile(24, warps=16), MatrixTile(24, warps=12))),
        (48, MatrixTiles(MatrixTile(32, warps=12), MatrixTile(32, warps=8))),
        (INFINITE, None),
    ),
    cores=(
        # 1.5 times the pairs of an average expert: few experts need a second block, which decodes the weights again.
        (11.3, CoreTile(16, 64, stages=3, warps=4, permuted=False)),
        (22, CoreTile(32, 64, stages=3, warps=4, permuted=True)),
        (43.3, CoreTile(64, 128, stages=2, warps=4, permuted=True)),
        (INFINITE, CoreTile(128, 128, stages=2, warps=8, permuted=True)),
    ),
    scanned_pairs=512,
)
"""What is used."""
