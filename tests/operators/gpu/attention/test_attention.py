"""The planners' protocol on CPU: what a plan attends to, what a decode plan takes, what is refused."""

from dataclasses import replace

import pytest
import torch

from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.page_lists import page_lists, staged

SHAPE = {"kv_heads": 2, "head_dim": 16, "page_size": 4}


def planner(kv, backend="auto", windows=frozenset({0, 6})):
    return make_planner(kv.layout, heads=4, scaling=0.25, windows=windows, device="cpu", backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [0, 6])
def test_a_plan_attends_as_the_reference(window, dtype, steps):
    kv = steps.cache(**SHAPE, dtype=dtype)
    step = steps.make(kv, [5, 1, 3], [9, 17, 3])
    query = steps.query(step, 4, torch.float32 if dtype == torch.float32 else torch.bfloat16)
    got = planner(kv).plan(step).attend(1, query, kv, scaling=0.25, sliding_window=window)
    assert (got.shape, got.dtype) == (query.shape, query.dtype)
    torch.testing.assert_close(got.float(), steps.expected(step, query, 1, 0.25, window), rtol=0.02, atol=0.02)


def test_a_decode_plan_follows_its_updates(steps):
    kv = steps.cache(**SHAPE, dtype=torch.float32)
    plan = planner(kv).decode_plan(3, 6)
    for contexts in ([9, 1, 17], [10, 2, 18]):
        step = steps.make(kv, [1, 1, 1], contexts)
        query = steps.query(step, 4, torch.float32)
        plan.update(step)
        expected = steps.expected(step, query, 0, 0.25, 0)
        step.context_lengths.fill_(1)  # as the host does for the next step
        step.page_table.zero_()
        torch.testing.assert_close(plan.attend(0, query, kv, scaling=0.25), expected)


def test_a_decode_plan_refuses_what_does_not_fit(steps):
    kv = steps.cache(**SHAPE, dtype=torch.float32)
    plan = planner(kv).decode_plan(2, 3)
    with pytest.raises(ValueError, match="for 2 rows of one token, not 3 rows of 3 tokens"):
        plan.update(steps.make(kv, [1, 1, 1], [4, 4, 4]))
    with pytest.raises(ValueError, match="not 2 rows of 3 tokens"):
        plan.update(steps.make(kv, [2, 1], [4, 4]))
    with pytest.raises(ValueError, match="rows of 3 pages of 4 keys, not 13 keys"):
        plan.update(steps.make(kv, [1, 1], [13, 4]))


def test_backends_that_cannot_be_had_are_refused_by_name(steps):
    kv = steps.cache(**SHAPE, dtype=torch.float32)
    with pytest.raises(ValueError, match="attention backend is 'fa7'; known are auto, flashinfer, triton, torch"):
        planner(kv, "fa7")
    for name in ("flashinfer", "triton"):
        with pytest.raises(ValueError, match=f"{name} needs a GPU, the device is cpu"):
            planner(kv, name)
    with pytest.raises(ValueError, match="5 query heads do not share 2"):
        make_planner(kv.layout, heads=5, scaling=1.0, windows=frozenset({0}), device="cpu")


def test_the_lists_have_the_pages_of_each_row_in_order(steps):
    kv = steps.cache(**SHAPE, dtype=torch.float32)
    step = steps.make(kv, [1, 2, 1], [4, 9, 1])
    lists = page_lists(step, 4)
    assert lists.starts.tolist() == [0, 1, 4, 5]
    assert lists.last.tolist() == [4, 1, 1]
    assert lists.pages.tolist() == [*step.page_table[0, :1], *step.page_table[1, :3], *step.page_table[2, :1]]
    host, offsets = staged([lists.starts, lists.pages], torch.device("cpu"))
    assert offsets == [0, 4] and host.dtype == torch.int32
    assert host[:9].tolist() == [*lists.starts, *lists.pages]
    assert staged([lists.last, lists.pages], torch.device("cpu"))[1] == [0, 4]


def test_lists_refuse_rows_without_keys_or_pages(steps):
    kv = steps.cache(**SHAPE, dtype=torch.float32)
    step = steps.make(kv, [1, 1], [4, 9])
    with pytest.raises(ValueError, match="at least one key"):
        page_lists(replace(step, context_lengths=torch.tensor([4, 0], dtype=torch.int32)), 4)
    with pytest.raises(ValueError, match="4 pages per row, a row of the step needs 5"):
        page_lists(replace(step, context_lengths=torch.tensor([4, 17], dtype=torch.int32)), 4)


def test_transformers_attention_goes_by_the_plan_of_the_step(tiny_model, steps):
    """The whole model with a plan, in two chunks, equals eager attention; without a plan the same cache does too."""
    eager, paged = tiny_model(), tiny_model(paged=True)
    ids = torch.randint(0, 96, (1, 11), generator=torch.Generator().manual_seed(1))
    kv = steps.cache(kv_heads=2, head_dim=16, page_size=4, dtype=torch.float32)
    calls = []

    class Recorded:
        def __init__(self, plan):
            self.plan = plan

        def attend(self, layer, *rest, **named):
            calls.append(layer)
            return self.plan.attend(layer, *rest, **named)

    with torch.no_grad():
        expected = eager(ids).logits[0]
        got = []
        for begin, end in ((0, 7), (7, 11)):
            step = steps.make(kv, [end - begin], [end])
            slots = [int(step.page_table[0, at // 4]) * 4 + at % 4 for at in range(begin, end)]
            plan = Recorded(planner(kv).plan(step))
            step = replace(step, slot_mapping=torch.tensor(slots), attention=plan)
            positions = torch.arange(begin, end)[None]
            got.append(paged(input_ids=ids[:, begin:end], position_ids=positions, use_cache=False, step=step).logits[0])
    assert calls == [0, 1, 0, 1]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-5)
