"""The attention kernel against its torch twin in float64, and its promises."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators import native, reference

BOUND = 2e-6  # of values of about 1


class Case:
    """A ragged batch with random keys and values. chunks: tokens fed per row; contexts: keys of each row after that."""

    def __init__(
        self,
        chunks: Sequence[int],
        contexts: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        page_size: int = 16,
        window: int = 0,
        cap: float = 0.0,
        chunk: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.page_size, self.window, self.cap, self.chunk = page_size, window, cap, chunk
        self.scaling = 1.1 * head_dim**-0.5  # not a power of two, so that it rounds
        used = [-(-context // page_size) for context in contexts]
        order = (torch.randperm(sum(used), generator=generator) + 1).int()
        self.cache = [torch.randn(sum(used) + 1, page_size, kv_heads, head_dim, generator=generator) for _ in range(2)]
        self.page_table = torch.zeros(len(chunks), max(used) + 1, dtype=torch.int32)
        for row, pages in enumerate(torch.split(order, used)):
            self.page_table[row, : len(pages)] = pages
        self.contexts = torch.tensor(contexts, dtype=torch.int32)
        self.starts = torch.tensor([0, *np.cumsum(chunks)], dtype=torch.int32)
        self.slots = torch.tensor(
            [
                int(self.page_table[row, position // page_size]) * page_size + position % page_size
                for row, (chunk, context) in enumerate(zip(chunks, contexts, strict=True))
                for position in range(context - chunk, context)
            ]
        )
        # As transformers passes them: [tokens, heads, head_dim], transposed to [heads, tokens, head_dim].
        self.query, self.key, self.value = (
            torch.randn(sum(chunks), count, head_dim, generator=generator).transpose(0, 1)
            for count in (heads, kv_heads, kv_heads)
        )

    def arrays(self) -> list[Any]:
        tensors = (self.query, self.key, self.value, *self.cache)
        return [tensor.numpy() for tensor in (*tensors, self.starts, self.contexts, self.page_table, self.slots)]

    def run(self, isa: str = "") -> torch.Tensor:
        out = torch.full((self.query.shape[1], self.query.shape[0], self.query.shape[2]), torch.nan)
        arrays = (*self.arrays(), out.numpy())
        options: dict[str, Any] = {"score_cap": self.cap, "sliding_window": self.window, "chunk": self.chunk}
        native.paged_attention(*arrays, scaling=self.scaling, **options, isa=isa)
        return out

    def expected(self) -> torch.Tensor:
        keys, values = (cache.double() for cache in self.cache)
        for cache, fed in ((keys, self.key), (values, self.value)):
            cache.view(-1, *cache.shape[2:])[self.slots] = fed.transpose(0, 1).double()
        return reference.paged_attention(
            self.query.double(),
            keys,
            values,
            self.starts,
            self.contexts,
            self.page_table,
            scaling=self.scaling,
            sliding_window=self.window or None,
            cap=self.cap,
            chunk=self.chunk,
        )

    def rows(self, *rows: int) -> "Case":
        """Return a case of these rows only, on the same pages."""
        part = object.__new__(Case)
        part.__dict__.update(self.__dict__)
        part.cache = [cache.clone() for cache in self.cache]
        spans = [range(int(self.starts[row]), int(self.starts[row + 1])) for row in rows]
        tokens = torch.tensor([token for span in spans for token in span])
        part.starts = torch.tensor([0, *np.cumsum([len(span) for span in spans])], dtype=torch.int32)
        part.contexts, part.page_table = self.contexts[list(rows)], self.page_table[list(rows)]
        part.slots = self.slots[tokens]
        part.query, part.key, part.value = (states[:, tokens] for states in (self.query, self.key, self.value))
        return part


def ragged(seed: int, rows: int = 9) -> tuple[list[int], list[int]]:
    random = np.random.default_rng(seed)
    chunks = [int(random.choice([1, 1, 2, 7, 16, 40, 100])) for _ in range(rows)]
    return chunks, [chunk + int(random.choice([0, 1, 15, 16, 70, 300])) for chunk in chunks]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(8, 2, 64, 16), (4, 4, 24, 5), (6, 2, 8, 1), (5, 1, 128, 100), (40, 1, 16, 16), (3, 3, 256, 64)],
)
def test_attention_equals_the_twin(
    heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, seed: int, isa: str, two_threads: None
) -> None:
    chunks, contexts = ragged(seed)
    case = Case(
        chunks,
        contexts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        window=window,
        seed=seed,
    )
    expected = case.expected()
    assert (case.run(isa) - expected).abs().max() <= BOUND


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (16, 16), (7, 5), (100, 16)])
def test_chunks_equal_the_twin(chunk: int, page_size: int, isa: str) -> None:
    """Rows cross borders of chunks within a step and between steps."""
    case = Case(*ragged(2), chunk=chunk, page_size=page_size)
    assert (case.run(isa) - case.expected()).abs().max() <= BOUND


@pytest.mark.parametrize("cap", [0.01, 0.5, 30.0])
def test_scores_with_a_soft_limit_equal_the_twin(cap: float, isa: str) -> None:
    """Scores are far below the limit or far above it, where the exponential in tanh would be infinite. tanh is exact to
    a float32 near 1, so a score is to that share of the limit."""
    case = Case(*ragged(1), window=20, cap=cap)
    assert (case.run(isa) - case.expected()).abs().max() <= BOUND + 2**-23 * cap


def test_the_kernel_writes_the_cache_and_nothing_else(isa: str) -> None:
    case = Case([3, 1], [5, 20])
    before = [cache.clone() for cache in case.cache]
    case.run(isa)
    for cache, old, fed in zip(case.cache, before, (case.key, case.value), strict=True):
        flat, old = cache.flatten(0, 1), old.flatten(0, 1)
        assert torch.equal(flat[case.slots], fed.transpose(0, 1))
        old[case.slots] = fed.transpose(0, 1)
        assert torch.equal(flat, old)


@pytest.mark.parametrize("window", [0, 33])
def test_a_row_does_not_depend_on_the_others(window: int, isa: str) -> None:
    """Its bits are the same alone, with others, and with 1 and 2 threads."""
    case = Case(*ragged(7), heads=8, head_dim=64, window=window)
    native.set_threads(1)
    together = case.rows(*range(9)).run(isa)
    for row in range(9):
        assert torch.equal(case.rows(row).run(isa), together[case.starts[row] : case.starts[row + 1]])
    native.set_threads(2, torch_threads=1)
    assert torch.equal(case.run(isa), together)
    native.set_threads(1)


@pytest.mark.parametrize("heads", [2, 6, 8])
@pytest.mark.parametrize("window", [0, 33])
def test_a_token_does_not_depend_on_its_chunk(window: int, heads: int, isa: str) -> None:
    """Its bits are the same for a prompt in one chunk, in chunks of 7, and token by token."""
    whole = Case([100], [100], heads=heads, head_dim=64, window=window)
    expected = whole.rows(0).run(isa)
    for size in (1, 7, 33):
        parts = whole.rows(0)
        for first in range(0, 100, size):
            last = min(first + size, 100)
            part = parts.rows(0)
            part.cache = parts.cache
            part.starts = torch.tensor([0, last - first], dtype=torch.int32)
            part.contexts = torch.tensor([last], dtype=torch.int32)
            part.slots = whole.slots[first:last]
            part.query, part.key, part.value = (
                states[:, first:last] for states in (whole.query, whole.key, whole.value)
            )
            assert torch.equal(part.run(isa), expected[first:last])


def test_a_nan_stays_with_its_row(isa: str) -> None:
    case = Case([1, 4, 1], [30, 9, 64])
    clean = case.rows(0, 1, 2).run(isa)
    case.key[0, 2] = torch.nan  # the second token of the middle row
    dirty = case.run(isa)
    assert torch.equal(dirty[[0, 1, 5]], clean[[0, 1, 5]])
    assert dirty[2:5, :2].isnan().all()


def test_stale_pages_are_never_read(isa: str) -> None:
    case = Case([1, 20], [17, 20])
    expected = case.expected()
    seen = torch.zeros(case.cache[0].shape[:2], dtype=torch.bool).flatten()
    for row, context in enumerate(case.contexts.tolist()):
        position = torch.arange(context)
        seen[case.page_table[row].long()[position // 16] * 16 + position % 16] = True
    for cache in case.cache:
        cache.flatten(0, 1)[~seen] = torch.nan
    assert (case.run(isa) - expected).abs().max() <= BOUND


def test_large_scores_do_not_overflow(isa: str) -> None:
    """With scores of +-1e5 one key gets all the weight, and nothing overflows."""
    case = Case([10], [50])
    case.scaling *= 1e5
    assert (case.run(isa) - case.expected()).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.slots.__setitem__(1, 10_000), r"slot_mapping\[1\] must be from 0 to 63, got 10000"),
        (lambda c: c.slots.__setitem__(1, -1), r"slot_mapping\[1\] must be from 0 to 63, got -1"),
        (lambda c: c.page_table.__setitem__((1, 1), 4), r"page_table\[1\]\[1\] must be from 0 to 3, got 4"),
        (lambda c: c.page_table.__setitem__((1, 1), -2), r"page_table\[1\]\[1\] must be from 0 to 3, got -2"),
        (lambda c: c.contexts.__setitem__(0, 2), r"context_lengths\[0\] is 2 but the row has 3 tokens"),
        (lambda c: c.contexts.__setitem__(0, 1000), r"context_lengths\[0\] is 1000, more than the row's 3 pages hold"),
        (lambda c: c.contexts.__setitem__(0, -5), r"context_lengths\[0\] is -5"),
        (lambda c: c.starts.__setitem__(2, 3), r"query_starts must run from 0 to the number of tokens \(4\)"),
        (lambda c: c.starts.__setitem__(1, 9), r"context_lengths\[0\] is 5 but the row has 9 tokens"),
        (lambda c: c.starts.__setitem__(1, -9), r"query_starts must not fall, row 0"),
        (lambda c: setattr(c, "query", c.query[:3]), "heads must be a positive multiple of kv_heads, got 3 and 2"),
        (lambda c: setattr(c, "slots", c.slots.int()), "slot_mapping has the wrong element type"),
        (lambda c: setattr(c, "key", c.key[:, :2]), r"key must have shape \[any, 4, 16\], got \[2, 2, 16\]"),
        (lambda c: setattr(c, "contexts", c.contexts[:1]), r"query_starts must have shape \[2\], got \[3\]"),
        (lambda c: setattr(c, "query", c.query.double()), "query has the wrong element type"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: Callable[[Case], None], message: str) -> None:
    case = Case([3, 1], [5, 20])
    before = [cache.clone() for cache in case.cache]
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run()
    assert all(torch.equal(cache, old) for cache, old in zip(case.cache, before, strict=True))


@pytest.mark.parametrize("head_dim", [4, 12, 1032])
def test_head_dims_that_the_kernel_does_not_compute_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim must be a multiple of 8 and at most \d+, got {head_dim}"):
        Case([1], [3], head_dim=head_dim).run()


def test_a_strided_last_dimension_is_refused() -> None:
    case = Case([1], [3])
    case.query = torch.empty(1, 32, 4).transpose(0, 2)[:, ::2].transpose(1, 2)
    with pytest.raises(ValueError, match="query must have a dense last dimension"):
        case.run()
