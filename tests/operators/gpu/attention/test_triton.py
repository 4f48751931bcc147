"""The kernels of paged attention, interpreted: they equal the reference for any mix of rows."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu/test_attention.py", allow_module_level=True)

from ktqueue.operators.gpu.attention import triton_prefill
from ktqueue.operators.gpu.attention.triton import TritonPlan, TritonPlanner
from ktqueue.operators.gpu.attention.triton_decode import split_count
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import ScoreOptions

from ..attention_steps import MIXED, assert_attended, check_plan, make_cache, make_shape, make_step, random_query
from ..interpreted import compiled_for_h200


def planner(kv: KVCache, heads: int, dtype: torch.dtype = torch.float32) -> TritonPlanner:
    return TritonPlanner(make_shape(kv, heads, dtype))


def buffers(plan: TritonPlan) -> list[int]:
    """Addresses of the page list and of the workspace."""
    assert plan.decode_rows
    return [plan.tables.pages.data_ptr(), plan.decode_rows.workspace.data_ptr()]


@pytest.mark.parametrize(
    ("heads", "page_size", "window"),
    [(2, 1, 0), (2, 16, 7), (2, 64, 33), (8, 1, 7), (8, 16, 33), (8, 64, 0), (14, 1, 33), (14, 16, 0), (14, 64, 7)],
)
def test_mixed_steps_equal_the_reference(heads: int, page_size: int, window: int) -> None:
    """Each of two key/value heads is shared by 1, 4 or 7 query heads."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=page_size, dtype=torch.float32, pages=240 // page_size + 5)
    step = make_step(kv, *MIXED)
    check_plan(planner(kv, heads).plan(step), step, random_query(step, heads), window)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_each_type_and_head_size_equals_the_reference(head_dim: int, cache: torch.dtype, window: int) -> None:
    """A head of 80 numbers is padded to 128."""
    kv = make_cache(kv_heads=1, head_dim=head_dim, page_size=16, dtype=cache, pages=24)
    step = make_step(kv, *MIXED)
    check_plan(planner(kv, 8, torch.bfloat16).plan(step), step, random_query(step, 8, torch.bfloat16), window)


def test_chunks_longer_than_a_tile_equal_the_reference() -> None:
    kv = make_cache(kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, pages=40)
    step = make_step(kv, [40, 33], [130, 34])
    for window in (0, 33):
        check_plan(planner(kv, 2).plan(step), step, random_query(step, 2), window)


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (40, 0), (0, 128)])
def test_long_blocks_of_keys_equal_the_reference(window: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper. The rows end within a block, at its end, and behind three blocks."""
    monkeypatch.setattr(triton_prefill, "has_large_shared_memory", lambda _: True)
    kv = make_cache(kv_heads=1, head_dim=64, page_size=16, dtype=torch.bfloat16, pages=70)
    step = make_step(kv, [50, 20, 3, 1], [420, 128, 3, 300])
    check_plan(
        planner(kv, 8, torch.bfloat16).plan(step), step, random_query(step, 8, torch.bfloat16), window, chunk=chunk
    )


@pytest.mark.parametrize(("processors", "splits"), [(12, 24), (30, 60), (64, 100)])
def test_joins_of_many_splits_equal_the_reference(processors: int, splits: int) -> None:
    """The joining program reads 32, 64 or 128 of them, of heads whose columns have one or two programs."""
    kv = make_cache(kv_heads=2, head_dim=128, page_size=16, dtype=torch.float32, pages=210)
    ours = planner(kv, 4)
    ours.processors = processors
    step = make_step(kv, [1], [3200])
    plan = ours.plan(step)
    assert plan.decode_rows is not None and plan.decode_rows.splits == splits
    check_plan(plan, step, random_query(step, 4))


@pytest.mark.parametrize("window", [0, 7])
def test_sinks_equal_the_reference(window: int) -> None:
    """One sink is above all scores of its head, one below."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, pages=20)
    step = make_step(kv, *MIXED)
    sinks = torch.tensor([30.0, -30.0, 0.5, 1.0, -1.0, 2.0])
    check_plan(planner(kv, 6).plan(step), step, random_query(step, 6), window, sinks)


@pytest.mark.parametrize("window", [0, 900])
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_of_many_splits_equal_the_reference(rows: int, window: int) -> None:
    """The longest row has 20 splits of several blocks. Pages of up to four rows are looked up a block ahead."""
    kv = make_cache(kv_heads=1, head_dim=64, page_size=16, dtype=torch.bfloat16, pages=200)
    step = make_step(kv, [1] * rows, [1900, 70, 33, 1, 500][:rows])
    ours = planner(kv, 8, torch.bfloat16)
    ours.processors = 5 * rows
    plan = ours.plan(step)
    assert plan.decode_rows and plan.decode_rows.splits == 20
    check_plan(plan, step, random_query(step, 8, torch.bfloat16), window)


@pytest.mark.parametrize("chunk", [6, 32])
def test_attention_within_chunks_equals_the_reference(chunk: int) -> None:
    """With chunks of whole blocks of keys, tiles within a chunk need no mask before their own tokens."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, pages=40)
    step = make_step(kv, [40, 1, 33, 1, 2], [130, 70, 34, 65, 64])
    check_plan(planner(kv, 4).plan(step), step, random_query(step, 4), chunk=chunk)


@pytest.mark.parametrize("window", [0, 7])
def test_scores_with_a_soft_limit_equal_the_reference(window: int) -> None:
    """Most scores are above the limit."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, pages=20)
    step = make_step(kv, *MIXED)
    check_plan(planner(kv, 6).plan(step), step, random_query(step, 6), window, cap=0.5)


@pytest.mark.parametrize("window", [0, 100])
def test_a_decode_plan_follows_its_updates(window: int) -> None:
    """Long rows are beside padding of length 1, and use one split or all. The buffers stay in place."""
    kv = make_cache(kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, pages=64)
    plan = planner(kv, 4).decode_plan(4, 32)
    places = buffers(plan)
    query = random_query(make_step(kv, [1] * 4, [1] * 4), 4)
    before = plan.attend(1, query, kv, ScoreOptions(0.2))
    torch.testing.assert_close(before, kv.values[1][0, 0].repeat_interleave(4, 0)[None].expand(4, -1, -1))
    for contexts in ([300, 1, 1, 1], [33, 17, 130, 65]):
        step = make_step(kv, [1] * 4, contexts)
        plan.update(step)
        check_plan(plan, step, query, window)
    assert places == buffers(plan)


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (7, 0), (0, 6)])
def test_a_prompt_plan_follows_its_updates(window: int, chunk: int) -> None:
    """Steps are smaller than the plan, or as large. Tokens behind those of a step get zeros. The buffers stay."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, pages=40)
    ours = planner(kv, 4)
    plan = ours.prompt_plan(5, 40, 16)
    assert ours.workspace_bytes == plan.bytes
    places = [table.data_ptr() for table in (plan.tables.pages, plan.tables.contexts)]
    query = random_query(make_step(kv, [40], [40]), 4)
    assert not plan.holds(make_step(kv, [41], [41])) and not plan.holds(make_step(kv, [1], [257]))
    options = ScoreOptions(0.2, window, chunk=chunk)
    assert not plan.attend(1, query, kv, options).any()
    for chunks, contexts in (MIXED, ([40], [70]), ([1, 39], [256, 39]), ([3], [4])):
        step, live = make_step(kv, chunks, contexts), sum(chunks)
        assert plan.holds(step)
        plan.update(step)
        got = plan.attend(1, query, kv, options)
        assert_attended(got[:live], step, query[:live], layer=1, scaling=0.2, window=window, chunk=chunk)
        assert not got[live:].any()
    assert places == [table.data_ptr() for table in (plan.tables.pages, plan.tables.contexts)]


def test_decode_rows_may_fill_the_table() -> None:
    """The list of pages is padded on the host, but the buffer has no room for the padding."""
    kv = make_cache(kv_heads=1, head_dim=16, page_size=4, dtype=torch.float32, pages=12)
    plan = planner(kv, 1).decode_plan(3, 3)
    step = make_step(kv, [1] * 3, [12, 9, 10])
    plan.update(step)
    check_plan(plan, step, random_query(step, 1))
    with pytest.raises(ValueError, match="3 pages of 4 keys, not 13"):
        plan.update(make_step(kv, [1] * 3, [13, 1, 1]))


def test_memory_is_shared_between_buckets() -> None:
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    ours = planner(kv, 8)
    big = ours.decode_plan(8, 4)
    held = ours.workspace_bytes
    small = ours.decode_plan(2, 4)
    assert buffers(small)[1] == buffers(big)[1]
    assert ours.workspace_bytes == held + small.bytes


def test_another_planner_has_memory_of_its_own() -> None:
    """Plans of both are in use at the same time."""
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, pages=20)
    ours = planner(kv, 8)
    steps = [make_step(kv, [1] * 3, contexts) for contexts in ([40, 7, 90], [90, 33, 12])]
    plans = ours.plan(steps[0]), ours.another().plan(steps[1])
    assert not {*buffers(plans[0])} & {*buffers(plans[1])}
    for plan, step in zip(plans, steps, strict=True):
        check_plan(plan, step, random_query(step, 8))


def test_splits_keep_the_processors_busy() -> None:
    assert split_count(1, 4, 131072, 132) == 128
    assert split_count(4, 8, 131072, 132) == 17
    assert split_count(64, 4, 131072, 132) == 8
    assert split_count(1, 4, 64, 132) == 2


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler refuses."""
    names = {"_decode_split", "_decode_join", "_prefill_tile", "_latent_split", "_expanded_tile", "_index_scores"}
    names |= {"_latent_inputs", "_latent_join", "_expand_keys"}
    assert set(compiled_for_h200("attention", tmp_path)) == names
