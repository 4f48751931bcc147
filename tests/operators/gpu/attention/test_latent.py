"""The kernel of latent attention, interpreted: it equals the reference for any mix of rows."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu/test_attention.py", allow_module_level=True)

from ktqueue.operators.gpu.attention import latent
from ktqueue.operators.gpu.attention.latent import LatentPlanner, split_count
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.latent_shape import expand_values
from ktqueue.operators.step import ScoreOptions

from ..attention_steps import MIXED, check_plan, make_cache, make_shape, make_step, random_query


def cache(latents: int, rotary: int, page_size: int, dtype: torch.dtype = torch.float32, pages: int = 40) -> KVCache:
    return make_cache(
        kv_heads=1, head_dim=latents + rotary, page_size=page_size, dtype=dtype, pages=pages, latent=latents
    )


def planner(kv: KVCache, heads: int, dtype: torch.dtype = torch.float32) -> LatentPlanner:
    return LatentPlanner(make_shape(kv, heads, dtype))


@pytest.mark.parametrize(
    ("heads", "latents", "rotary", "page_size", "dtype"),
    [
        (4, 32, 16, 16, torch.float32),
        (16, 48, 8, 8, torch.float32),
        (40, 32, 16, 16, torch.float32),
        (4, 64, 32, 16, torch.bfloat16),
        (4, 64, 32, 16, torch.float8_e4m3fn),
    ],
)
def test_mixed_steps_equal_the_reference(
    heads: int, latents: int, rotary: int, page_size: int, dtype: torch.dtype
) -> None:
    """Heads fill a program partly, or three programs. Widths are not powers of two."""
    kv = cache(latents, rotary, page_size, dtype)
    step = make_step(kv, *MIXED)
    states = torch.float32 if dtype == torch.float32 else torch.bfloat16
    plan = planner(kv, heads, states).plan(step)
    assert plan.decode_rows and plan.decode_rows.splits == 1
    check_plan(plan, step, random_query(step, heads, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("contexts", [[300, 1, 33, 64], [5, 2, 1, 3]])
def test_few_tokens_are_split(contexts: list[int], dtype: torch.dtype) -> None:
    kv = cache(32, 16, 16, dtype)
    step = make_step(kv, [1, 1, 1, 1], contexts)
    ours = planner(kv, 4)
    ours.processors = 16
    plan = ours.plan(step)
    assert plan.decode_rows and plan.decode_rows.splits == (10 if max(contexts) == 300 else 2)
    check_plan(plan, step, random_query(step, 4))


def test_a_decode_plan_follows_its_updates() -> None:
    kv = cache(32, 16, 16, pages=64)
    plan = planner(kv, 4).decode_plan(4, 32)
    assert plan.decode_rows
    places = [plan.tables.pages.data_ptr(), plan.decode_rows.workspace.data_ptr()]
    for contexts in ([300, 1, 1, 1], [33, 17, 130, 65]):
        step = make_step(kv, [1] * 4, contexts)
        plan.update(step)
        check_plan(plan, step, random_query(step, 4))
    assert places == [plan.tables.pages.data_ptr(), plan.decode_rows.workspace.data_ptr()]


def test_windows_are_refused() -> None:
    kv = cache(32, 16, 16)
    step = make_step(kv, [1], [3])
    with pytest.raises(ValueError, match="no sliding windows"):
        planner(kv, 4).plan(step).attend(0, random_query(step, 4), kv, ScoreOptions(0.2, 5))


def test_splits_keep_the_processors_busy() -> None:
    assert split_count(1, 16, 131072, 132) == 128
    assert split_count(8, 16, 131072, 132) == 64
    assert split_count(8, 128, 131072, 132) == 8
    assert split_count(512, 16, 512, 132) == 2
    assert split_count(2048, 16, 2048, 132) == 1
    assert split_count(3, 16, 2, 132) == 2


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)],
)
@pytest.mark.parametrize(("heads", "value", "contexts"), [(4, 24, [300, 1, 33]), (20, 40, [130, 70, 5, 64, 9])])
def test_few_heads_are_joined_and_expanded_at_once(
    heads: int,
    value: int,
    contexts: list[int],
    dtype: torch.dtype,
    stored: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are what the product makes of the attended latents. A hundred heads of all tokens are too many."""
    kv = cache(48, 16, 16, stored, pages=64)
    step = make_step(kv, [1] * len(contexts), contexts)
    ours = planner(kv, heads, dtype)
    ours.processors = 64
    plan, query = ours.decode_plan(len(contexts), 32), random_query(step, heads, dtype)
    plan.update(step)
    assert isinstance(plan, latent.LatentPlan)
    value_up = torch.randn(heads, 8 + value, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    value_up = value_up[:, 8:].transpose(1, 2)
    options = ScoreOptions(0.2)
    expected = expand_values(plan.attend(1, query, kv, options), value_up)
    if heads * len(contexts) <= 16:  # not by that product
        monkeypatch.setattr(latent, "expand_values", None)
    got = plan.values(1, query, value_up, kv, options)
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, expected, rtol=bound, atol=4 * bound)
