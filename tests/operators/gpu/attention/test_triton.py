"""The kernels of paged attention, interpreted: they equal the reference whatever the step is made of."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu/test_attention.py", allow_module_level=True)

from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.triton import TritonPlanner
from ktqueue.operators.gpu.attention.triton_decode import split_count

from ..interpreted import compiled_for_h200

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
MIXED = ([20, 1, 3, 1, 2], [41, 70, 3, 1, 37])  # tokens of each row and the keys that its last one sees


def planner(kv, heads, dtype=torch.float32):
    shape = AttentionShape(layout=kv.layout, heads=heads, scaling=0.2, windows=(0,), device="cpu", dtype=dtype)
    return TritonPlanner(shape)


def check(plan, step, query, steps, window=0):
    got = plan.attend(1, query, step.kv, scaling=0.2, sliding_window=window)
    assert (got.shape, got.dtype) == (query.shape, query.dtype)
    bound = BOUNDS[query.dtype]
    torch.testing.assert_close(got.float(), steps.expected(step, query, 1, 0.2, window), rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("heads", "page_size", "window"),
    [(2, 1, 0), (2, 16, 7), (2, 64, 33), (8, 1, 7), (8, 16, 33), (8, 64, 0), (14, 1, 33), (14, 16, 0), (14, 64, 7)],
)
def test_mixed_steps(heads, page_size, window, steps):
    """Two key/value heads shared by 1, 4 and 7 query heads each."""
    kv = steps.cache(kv_heads=2, head_dim=16, page_size=page_size, dtype=torch.float32, pages=240 // page_size + 5)
    step = steps.make(kv, *MIXED)
    check(planner(kv, heads).plan(step), step, steps.query(step, heads, torch.float32), steps, window)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_types_and_head_sizes(head_dim, cache, window, steps):
    """A head of 80 numbers is padded to 128."""
    kv = steps.cache(kv_heads=1, head_dim=head_dim, page_size=16, dtype=cache, pages=24)
    step = steps.make(kv, *MIXED)
    check(planner(kv, 8, torch.bfloat16).plan(step), step, steps.query(step, 8, torch.bfloat16), steps, window)


def test_chunks_longer_than_a_tile(steps):
    kv = steps.cache(kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, pages=40)
    step = steps.make(kv, [40, 33], [130, 34])
    for window in (0, 33):
        check(planner(kv, 2).plan(step), step, steps.query(step, 2, torch.float32), steps, window)


@pytest.mark.parametrize("window", [0, 100])
def test_a_decode_plan_follows_its_updates(window, steps):
    """Long rows beside padded ones of length 1, all splits used or one; the buffers stay where they are."""
    kv = steps.cache(kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, pages=64)
    plan = planner(kv, 4).decode_plan(4, 32)
    places = [plan._tables.pages.data_ptr(), plan._decode.workspace.data_ptr()]
    query = steps.query(steps.make(kv, [1] * 4, [1] * 4), 4, torch.float32)
    before = plan.attend(1, query, kv, scaling=0.2)
    torch.testing.assert_close(before, kv.values[1][0, 0].repeat_interleave(4, 0)[None].expand(4, -1, -1))
    for contexts in ([300, 1, 1, 1], [33, 17, 130, 65]):
        step = steps.make(kv, [1] * 4, contexts)
        plan.update(step)
        check(plan, step, query, steps, window)
    assert places == [plan._tables.pages.data_ptr(), plan._decode.workspace.data_ptr()]


@pytest.mark.parametrize("contexts", [([300, 1], [33, 17, 65]), ([5, 2], [130, 300, 1])])
def test_plans_of_one_step_do_not_meet(contexts, steps):
    """Halves that take turns: both are updated before either attends."""
    kv = steps.cache(kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, pages=64)
    ours = planner(kv, 4)
    halves = [steps.make(kv, [1] * len(rows), list(rows)) for rows in contexts]
    plans = [ours.decode_plan(len(rows), 32) for rows in contexts]
    for plan, step in zip(plans, halves, strict=True):
        plan.update(step)
    for plan, step in zip(plans * 2, halves * 2, strict=True):
        check(plan, step, steps.query(step, 4, torch.float32), steps)


def test_decode_rows_that_fill_the_table(steps):
    """The list of pages is padded on the host; the buffer has no place for that."""
    kv = steps.cache(kv_heads=1, head_dim=16, page_size=4, dtype=torch.float32, pages=12)
    plan = planner(kv, 1).decode_plan(3, 3)
    step = steps.make(kv, [1] * 3, [12, 9, 10])
    plan.update(step)
    check(plan, step, steps.query(step, 1, torch.float32), steps)
    with pytest.raises(ValueError, match="3 pages of 4 keys, not 13"):
        plan.update(steps.make(kv, [1] * 3, [13, 1, 1]))


def test_memory_is_shared_between_buckets(steps):
    kv = steps.cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    ours = planner(kv, 8)
    big = ours.decode_plan(8, 4)
    held = ours.workspace_bytes
    small = ours.decode_plan(2, 4)
    assert small._decode.workspace.data_ptr() == big._decode.workspace.data_ptr()
    assert ours.workspace_bytes == held + small.bytes


def test_splits_keep_the_processors_busy():
    assert split_count(1, 4, 131072, 132) == 128
    assert split_count(4, 8, 131072, 132) == 17
    assert split_count(64, 4, 131072, 132) == 8
    assert split_count(1, 4, 64, 132) == 2


def test_an_h200_takes_them(tmp_path):
    """The interpreter accepts what the compiler refuses."""
    names = {"_decode_split", "_decode_join", "_prefill_tile", "_latent_split"}
    assert set(compiled_for_h200("attention", tmp_path)) == names
