"""Prefetching fetches the bytes that each thread of the kernels will read first, and no others.

The extension lists the lines that each thread would fetch, without fetching them. The driver of csrc shows that forward
reads in the same order (`make sanitize`, driver/prefetch_case.cpp).
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
from kernel_types import MakeWeights, SetPool

from ktqueue.operators import native
from ktqueue.operators.packed import ExpertWeights

Ranges = list[tuple[int, int]]
"""(address, bytes), in order."""

UNLIMITED = 2**40
LINE = 64
"""Bytes of a cache line, the unit of fetching."""
AT_ONCE = 2048
"""Bytes that a thread fetches between two calls of stop()."""
POOLS = [(1, 1), (2, 1), (3, 1), (2, 2), (5, 2), (7, 3)]
"""(threads, NUMA nodes)"""


@pytest.fixture
def set_pool() -> Iterator[SetPool]:
    """set_pool(threads, nodes); one thread afterwards."""

    def set_to(threads: int, nodes: int) -> None:
        native.set_threads(threads, torch_threads=1, pretend_nodes=nodes)

    yield set_to
    native.set_threads(1)


def walks(
    layer: native.ExpertLayer, experts: list[int], most_bytes: int = UNLIMITED, stop_after: int = UNLIMITED
) -> list[Ranges]:
    """Return what each thread fetches, with adjacent lines joined."""
    found: list[Ranges] = []
    for of_thread in layer.bound.prefetch_lines(experts, most_bytes, stop_after):
        lines = np.array(of_thread, np.int64)
        runs = np.split(lines, np.flatnonzero(np.diff(lines) != LINE) + 1)
        found.append([(int(run[0]), LINE * len(run)) for run in runs if len(run)])
    return found


def joined(ranges: Ranges) -> Ranges:
    """Join ranges that are adjacent. The bytes and their order stay the same."""
    result: Ranges = []
    for begin, size in ranges:
        if result and sum(result[-1]) == begin:
            result[-1] = (result[-1][0], result[-1][1] + size)
        else:
            result.append((begin, size))
    return result


def first_bytes(ranges: Ranges, size: int) -> Ranges:
    """Return the first `size` bytes, or all if there are fewer."""
    result: Ranges = []
    for begin, length in ranges:
        if size > 0:
            result.append((begin, min(size, length)))
        size -= length
    return result


def size_of(ranges: Ranges) -> int:
    return sum(size for _, size in ranges)


def require_each_byte_once(layer: native.ExpertLayer, experts: list[int]) -> None:
    """Check that all threads together fetch each byte of the experts' memory once, and nothing else."""
    fetched = sorted(chain.from_iterable(walks(layer, experts)))
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(fetched))
    expected = sorted(chain.from_iterable(layer.ranges(expert) for expert in experts))
    assert joined(fetched) == joined(expected)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_each_byte_of_the_experts_is_fetched_once(quant: str, make_weights: MakeWeights, set_pool: SetPool) -> None:
    weights = make_weights((quant, "Q8_0", quant), 5, 256, 768)
    for threads, nodes in POOLS:
        set_pool(threads, nodes)
        layer = native.ExpertLayer(weights)
        for experts in ([0], [4], [1, 3], [0, 1, 2, 3, 4]):
            require_each_byte_once(layer, experts)
        assert walks(layer, []) == [[]] * threads


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (17, 16), (107, 150), (33, 600), (600, 33)])
def test_each_byte_is_fetched_once_in_odd_shapes(
    hidden: int, intermediate: int, make_weights: MakeWeights, set_pool: SetPool
) -> None:
    weights = make_weights(("F32", "F16", "BF16"), 3, hidden, intermediate)
    for threads, nodes in POOLS:
        set_pool(threads, nodes)
        layer = native.ExpertLayer(weights)
        for experts in ([0], [2], [0, 2], [0, 1, 2]):
            require_each_byte_once(layer, experts)


def test_each_byte_is_fetched_once_after_the_pool_has_changed(make_weights: MakeWeights, set_pool: SetPool) -> None:
    set_pool(4, 2)
    layer = native.ExpertLayer(make_weights("Q4_0", 4, 160, 320))
    for threads, nodes in POOLS:
        set_pool(threads, nodes)
        require_each_byte_once(layer, [0, 3])


def panel_ranges(layer: native.ExpertLayer, expert: int, weights: ExpertWeights) -> tuple[Ranges, Ranges]:
    """Return the ranges of an expert's panels: gate and up as pairs, and down."""
    pair, down = (
        sum(native.packed_bytes(matrix.quant, 16, matrix.columns) for matrix in matrices)
        for matrices in ((weights.gate, weights.up), (weights.down,))
    )
    count = -(-weights.gate.rows // 16)
    sizes = [pair] * count + [down] * -(-weights.down.rows // 16)
    panels: Ranges = []
    for begin, size in layer.ranges(expert):
        address = begin
        while address < begin + size:
            panels.append((address, sizes[len(panels)]))
            address += panels[-1][1]
    assert len(panels) == len(sizes)
    return panels[:count], panels[count:]


def tasks(panels: Sequence[Ranges], nodes: int, step: int) -> list[Ranges]:
    """Return the tasks over the experts' `panels` in csrc/experts/expert_panels.h's order: by node, then expert."""
    count = len(panels[0])
    edges = [count * node // nodes // 2 * 2 for node in range(nodes)] + [count]
    return [
        of_expert[first : min(first + step, end)]
        for begin, end in pairwise(edges)
        for of_expert in panels
        for first in range(begin, end, step)
    ]


def share(tasks: list[Ranges], thread: int, threads: int) -> Ranges:
    """Return the tasks that the pool gives to one thread (csrc/threads/thread_pool.h)."""
    begin, end = (-(-len(tasks) * index // threads) for index in (thread, thread + 1))
    return list(chain.from_iterable(tasks[begin:end]))


@pytest.mark.parametrize(("threads", "nodes"), POOLS)
def test_each_thread_fetches_what_it_will_read_in_that_order(
    threads: int, nodes: int, make_weights: MakeWeights, set_pool: SetPool
) -> None:
    """A thread fetches its share of gate and up, then of down. A small task has 8 KB: 2 pairs, or 4 panels of down."""
    set_pool(threads, nodes)
    weights = make_weights(("F32", "F32", "Q4_0"), 6, 200, 160)
    layer = native.ExpertLayer(weights)
    for experts in ([2], [1, 2, 5]):
        pairs, downs = zip(*(panel_ranges(layer, expert, weights) for expert in experts), strict=True)
        expected = [
            joined(share(tasks(pairs, nodes, 2), thread, threads) + share(tasks(downs, nodes, 4), thread, threads))
            for thread in range(threads)
        ]
        assert walks(layer, experts) == expected


@pytest.mark.parametrize(("threads", "nodes"), [(1, 1), (3, 1), (4, 2)])
def test_no_thread_fetches_more_than_the_limit(
    threads: int, nodes: int, make_weights: MakeWeights, set_pool: SetPool
) -> None:
    set_pool(threads, nodes)
    layer = native.ExpertLayer(make_weights(("Q4_0", "Q8_0", "Q4_0"), 6, 192, 160))
    whole = walks(layer, [1, 4, 5])
    assert min(map(size_of, whole)) > 10 * AT_ONCE
    for most in (0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 9 * AT_ONCE + 64, max(map(size_of, whole)) - 1):
        limited = walks(layer, [1, 4, 5], most)
        assert limited == [first_bytes(walk, most // AT_ONCE * AT_ONCE) for walk in whole]


@pytest.mark.parametrize(("threads", "nodes"), [(1, 1), (3, 1), (4, 2)])
def test_a_stopped_thread_fetches_nothing_more(
    threads: int, nodes: int, make_weights: MakeWeights, set_pool: SetPool
) -> None:
    set_pool(threads, nodes)
    layer = native.ExpertLayer(make_weights(("Q4_0", "Q8_0", "Q4_0"), 6, 192, 160))
    whole = walks(layer, [1, 4, 5])
    for questions in (0, 1, 2, 17, 40):
        stopped = walks(layer, [1, 4, 5], stop_after=questions)
        assert stopped == [first_bytes(walk, size_of(part)) for walk, part in zip(whole, stopped, strict=True)]
        # Each call of stop() that returns false allows AT_ONCE bytes, or fewer at the end of a thread's walk.
        assert (questions - threads) * AT_ONCE < sum(map(size_of, stopped)) <= questions * AT_ONCE
