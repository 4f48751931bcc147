"""On a GPU, one launch makes queries, keys and values and attends as separate operations do, also launched early."""

import pytest
import torch

from ktqueue.operators.gpu.attention.by_clusters import Projection
from ktqueue.operators.gpu.attention.triton import ClusterDecodePlan, TritonPlanner
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import ScoreOptions, StepContext

from .test_attention import make_step, planner, random_cache, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="the GPU has no clusters"
    ),
]

EPSILON = 1e-5
CASES = {
    "Qwen3": (32, 4, 128, torch.bfloat16, torch.bfloat16),
    "without norms, in float16": (8, 8, 64, torch.float16, None),
    "float norms, twelve heads of a key": (24, 2, 128, torch.bfloat16, torch.float32),
    "seven heads of a key": (14, 2, 64, torch.bfloat16, torch.bfloat16),
}


def plan_of(layout: KVLayout, heads: int, rows: int, pages: int) -> ClusterDecodePlan:
    plans = planner(layout, "triton", heads, layout.dtype, {0})
    assert isinstance(plans, TritonPlanner)
    plan = plans.decode_plan(rows, pages)
    assert isinstance(plan, ClusterDecodePlan)
    return plan


def slots_of(step: StepContext) -> torch.Tensor:
    """The slot of the newest key of each row, on the GPU."""
    size, newest = step.kv.layout.page_size, step.context_lengths.long() - 1
    pages = step.page_table.gather(1, newest[:, None] // size)[:, 0].long()
    return (pages * size + newest % size).cuda()


def separately(
    x: Projection, heads: int, kv: KVCache, step: StepContext, options: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What separate operations make of it: queries, and the newest keys and values in the cache."""
    query = qk_norm_rope_append(
        x.qkv,
        heads=heads,
        kv_heads=kv.layout.kv_heads,
        q_norm=x.q_norm,
        k_norm=x.k_norm,
        epsilon=x.epsilon,
        cosine=x.cosine,
        sine=x.sine,
        positions=x.positions,
        slot_mapping=x.slot_mapping,
        keys=kv.keys[0],
        values=kv.values[0],
    )
    newest = [part[0].flatten(0, 1)[x.slot_mapping].clone() for part in (kv.keys, kv.values)]
    return query, newest[0], newest[1]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 20, 40, 100, 150])
@pytest.mark.parametrize("case", CASES)
def test_a_graph_makes_and_attends(case: str, rows: int) -> None:
    """One capture, replays for other lengths, pages and products. A product right before it writes what it reads."""
    heads, kv_heads, head_dim, dtype, norm = CASES[case]
    torch.manual_seed(rows)
    layout = KVLayout(layers=1, kv_heads=kv_heads, head_dim=head_dim, page_size=16, dtype=dtype)
    kv = random_cache(layout, 3000)
    plan = plan_of(layout, heads, rows, 600)
    norms = [None if norm is None else (torch.rand(head_dim, device="cuda") / 2 + 0.25).to(norm) for _ in range(2)]
    cosine, sine = (torch.rand(10000, head_dim // 2, device="cuda") for _ in range(2))
    width = (heads + 2 * kv_heads) * head_dim
    positions, slots = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    source, qkv = (torch.zeros(rows, width + 64, dtype=dtype, device="cuda") for _ in range(2))
    x = Projection(qkv[:, :width], norms[0], norms[1], EPSILON, cosine, sine, positions, slots)
    options = ScoreOptions(head_dim**-0.5)
    graph = torch.cuda.CUDAGraph()
    with dependent_launches(True):
        plan.attend_to(0, x, heads, kv, options)
        with torch.cuda.graph(graph):
            qkv.copy_(source)
            found = plan.attend_to(0, x, heads, kv, options)
            again = plan.attend_to(0, x, heads, kv, options)
    for longest in (1, 17, 250, 9000, 40):
        contexts = [1 + (37 * row) % min(longest, 250) for row in range(rows - 1)] + [longest]
        step = make_step(kv, [1] * rows, contexts)
        source.copy_(torch.randn(source.shape, device="cuda"))
        positions.copy_(torch.tensor(contexts) - 1)
        slots.copy_(slots_of(step))
        before = [part[0].clone() for part in (kv.keys, kv.values)]
        plan.update(step)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, again)
        written = [part[0].flatten(0, 1)[slots].clone() for part in (kv.keys, kv.values)]
        for part, old in zip((kv.keys[0], kv.values[0]), before, strict=True):
            old.flatten(0, 1)[slots] = part.flatten(0, 1)[slots]
            assert torch.equal(part, old), "other keys or values have changed"
        expected = Projection(source[:, :width], *x[1:])
        query, keys, values = separately(expected, heads, kv, step, options)
        # Squares add in another order, so that a few numbers round to a neighbour before the rotation.
        differences = (written[0].float() - keys.float()).abs()
        assert (differences > 0).float().mean() < 0.01
        assert (differences <= keys.float().abs().amax(-1, keepdim=True) / 64).all()
        assert torch.equal(written[1], values)
        same(found, step, query, head_dim**-0.5, 0)
        same(plan.attend(0, query, kv, options), step, query, head_dim**-0.5, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [2, 30])
def test_windows_caps_and_sinks(rows: int, head_dim: int) -> None:
    layout = KVLayout(layers=1, kv_heads=4, head_dim=head_dim, page_size=32, dtype=torch.bfloat16)
    kv = random_cache(layout, 2000)
    plan = plan_of(layout, 32, rows, 300)
    sinks = torch.randn(32, device="cuda")
    query = torch.randn(rows, 32, head_dim, device="cuda").to(torch.bfloat16)
    for longest in (1, 100, 5000):
        step = make_step(kv, [1] * rows, [1 + (61 * row) % longest for row in range(rows - 1)] + [longest])
        plan.update(step)
        for options in (
            ScoreOptions(0.1, 100),
            ScoreOptions(0.1, 0, sinks),
            ScoreOptions(0.1, 100, sinks),
            ScoreOptions(0.1, cap=0.7),
            ScoreOptions(0.1, chunk=96),
        ):
            got = plan.attend(0, query, kv, options)
            same(got, step, query, 0.1, options.sliding_window, options.sinks, options.cap, options.chunk)
