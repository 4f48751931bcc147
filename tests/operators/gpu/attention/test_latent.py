"""The kernel of latent attention, interpreted: it equals the reference whatever the step is made of."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu/test_attention.py", allow_module_level=True)

from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.latent import LatentPlanner, split_count
from ktqueue.operators.kv_cache import KVCache, KVLayout

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
MIXED = ([20, 1, 3, 1, 2], [41, 70, 3, 1, 37])  # tokens of each row and the keys that its last one sees


def cache(latent: int, rotary: int, page_size: int, dtype: torch.dtype = torch.float32, pages: int = 40) -> KVCache:
    layout = KVLayout(layers=2, kv_heads=1, head_dim=latent + rotary, page_size=page_size, dtype=dtype, latent=latent)
    kv = KVCache(layout, pages)
    noise = torch.Generator().manual_seed(7)
    for tensor in kv.keys:
        tensor.copy_(torch.randn(tensor.shape, generator=noise).to(dtype))
    return kv


def planner(kv: KVCache, heads: int, dtype: torch.dtype = torch.float32) -> LatentPlanner:
    return LatentPlanner(
        AttentionShape(layout=kv.layout, heads=heads, scaling=0.2, windows=(0,), device="cpu", dtype=dtype)
    )


def check(plan, step, query, steps):
    got = plan.attend(1, query, step.kv, scaling=0.2)
    assert got.shape == (*query.shape[:2], step.kv.layout.latent) and got.dtype == query.dtype
    bound = BOUNDS[query.dtype]
    torch.testing.assert_close(got.float(), steps.expected(step, query, 1, 0.2, 0), rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("heads", "latent", "rotary", "page_size", "dtype"),
    [
        (4, 32, 16, 16, torch.float32),
        (16, 48, 8, 8, torch.float32),
        (40, 32, 16, 16, torch.float32),
        (4, 64, 32, 16, torch.bfloat16),
        (4, 64, 32, 16, torch.float8_e4m3fn),
    ],
)
def test_mixed_steps(heads, latent, rotary, page_size, dtype, steps):
    """Heads that fill a program in part or three of them; widths that are no powers of two."""
    kv = cache(latent, rotary, page_size, dtype)
    step = steps.make(kv, *MIXED)
    states = torch.float32 if dtype == torch.float32 else torch.bfloat16
    plan = planner(kv, heads, states).plan(step)
    assert plan._decode.splits == 1
    check(plan, step, steps.query(step, heads, states), steps)


@pytest.mark.parametrize("contexts", [[300, 1, 33, 64], [5, 2, 1, 3]])
def test_few_tokens_are_split(contexts, steps):
    kv = cache(32, 16, 16)
    step = steps.make(kv, [1, 1, 1, 1], contexts)
    ours = planner(kv, 4)
    ours._processors = 16
    plan = ours.plan(step)
    assert plan._decode.splits == (10 if max(contexts) == 300 else 2)
    check(plan, step, steps.query(step, 4, torch.float32), steps)


def test_a_decode_plan_follows_its_updates(steps):
    kv = cache(32, 16, 16, pages=64)
    plan = planner(kv, 4).decode_plan(4, 32)
    places = [plan._tables.pages.data_ptr(), plan._decode.workspace.data_ptr()]
    for contexts in ([300, 1, 1, 1], [33, 17, 130, 65]):
        step = steps.make(kv, [1] * 4, contexts)
        plan.update(step)
        check(plan, step, steps.query(step, 4, torch.float32), steps)
    assert places == [plan._tables.pages.data_ptr(), plan._decode.workspace.data_ptr()]


def test_plans_of_one_step_do_not_meet(steps):
    """Halves that take turns: both are updated before either attends."""
    kv = cache(32, 16, 16, pages=64)
    ours = planner(kv, 4)
    halves = [steps.make(kv, [1] * len(contexts), contexts) for contexts in ([300, 1], [33, 17, 65])]
    plans = [ours.decode_plan(len(step.context_lengths), 32) for step in halves]
    for plan, step in zip(plans, halves, strict=True):
        plan.update(step)
    for plan, step in zip(plans * 2, halves * 2, strict=True):
        check(plan, step, steps.query(step, 4, torch.float32), steps)


def test_windows_are_refused(steps):
    kv = cache(32, 16, 16)
    step = steps.make(kv, [1], [3])
    with pytest.raises(ValueError, match="no sliding windows"):
        planner(kv, 4).plan(step).attend(0, steps.query(step, 4, torch.float32), kv, scaling=0.2, sliding_window=5)


def test_shares_keep_the_processors_busy():
    assert split_count(1, 16, 131072, 132) == 128
    assert split_count(8, 16, 131072, 132) == 66
    assert split_count(8, 128, 131072, 132) == 9
    assert split_count(512, 16, 512, 132) == 2
    assert split_count(2048, 16, 2048, 132) == 1
    assert split_count(3, 16, 2, 132) == 2
