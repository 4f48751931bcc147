"""The router: the twin chooses the experts that the modules of transformers do, the kernel those of the twin."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.router import Scoring, route

from ..interpreted import by_kernel, by_twin
from .comparing import DTYPES, assert_same, clones, config_sizes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MixtralTopKRouter, MixtralConfig(**config_sizes(num_local_experts=8, num_experts_per_tok=2))),
        (
            Qwen3MoeTopKRouter,
            Qwen3MoeConfig(**config_sizes(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
        ),
        (OlmoeTopKRouter, OlmoeConfig(**config_sizes(num_experts=64, num_experts_per_tok=8))),
        (Qwen2MoeTopKRouter, Qwen2MoeConfig(**config_sizes(num_experts=60, num_experts_per_tok=4))),
    ],
    ids=["mixtral", "qwen3", "olmoe", "qwen2"],
)
def test_experts_and_weights_are_those_of_transformers(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> None:
    router: Any = kind(config).to(dtype)
    router.weight.data.normal_(std=0.3)
    logits, weights, ids = router(torch.randn(9, 48).to(dtype))
    routing = route(logits.data, ids.shape[1], renormalise=getattr(router, "norm_topk_prob", True))
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights.to(weights.dtype), weights.data)
    # If logits are equal, as bf16 ones sometimes are, transformers' choice is undefined.
    torch.testing.assert_close(logits.gather(1, routing.ids), logits.gather(1, ids), rtol=0, atol=0)
    assert len(set(routing.ids[0].tolist())) == ids.shape[1]


GROUPS = {"n_group": 8, "topk_group": 3}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (DeepseekV2TopkRouter, DeepseekV2Config(**config_sizes(n_routed_experts=64, num_experts_per_tok=6))),
        (
            DeepseekV2TopkRouter,
            DeepseekV2Config(
                **config_sizes(n_routed_experts=64, num_experts_per_tok=6, routed_scaling_factor=16.0, **GROUPS),
                topk_method="group_limited_greedy",
            ),
        ),
        (DeepseekV3TopkRouter, DeepseekV3Config(**config_sizes(n_routed_experts=64, num_experts_per_tok=8, **GROUPS))),
        (
            DeepseekV3TopkRouter,
            DeepseekV3Config(
                **config_sizes(
                    n_routed_experts=64, num_experts_per_tok=6, n_group=1, topk_group=1, norm_topk_prob=False
                )
            ),
        ),
    ],
    ids=["V2-Lite", "V2", "V3", "one group"],
)
def test_deepseek_routers_are_those_of_transformers(kind: type[nn.Module], config: Any) -> None:
    router: Any = kind(config)
    router.weight.data.normal_(std=0.3)
    facts: dict[str, Any] = {} if kind is DeepseekV2TopkRouter else {"sigmoid": True}
    if facts:
        router.e_score_correction_bias.uniform_(-0.3, 0.3)
        facts["bias"] = router.e_score_correction_bias
    if facts or config.topk_method == "group_limited_greedy":
        facts |= {"groups": config.n_group, "groups_used": config.topk_group}
    scoring = Scoring(scale=config.routed_scaling_factor, **facts)
    logits, weights, ids = router(torch.randn(9, 48))
    routing = route(
        logits.data,
        ids.shape[1],
        renormalise=bool(facts.get("sigmoid") and config.norm_topk_prob),
        choice=scoring.choice(logits.data),
        sigmoid=scoring.sigmoid,
        scale=scoring.scale,
    )
    order, ours = ids.argsort(-1), routing.ids.argsort(-1)
    assert torch.equal(routing.ids.gather(1, ours), ids.gather(1, order))
    torch.testing.assert_close(routing.weights.gather(1, ours), weights.data.gather(1, order))
    assert (routing.weights.diff(dim=-1) <= 0).all()  # however they were chosen


def test_routers_with_jitter_are_those_of_transformers() -> None:
    logits = torch.randn(50, 12)
    weights, ids = sparsemixer(logits, 0.3, training=False)  # type: ignore[no-untyped-call]
    routing = route(logits, 2, renormalise=False, jitter=0.3)
    assert torch.equal(routing.ids, ids)
    torch.testing.assert_close(routing.weights, weights)
    assert ((weights < 0.9) & (weights > 0.1)).any(0).all()  # else any rule would do


def test_chosen_experts_are_ordered_by_their_weights() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    choice = torch.tensor([[5.0, 1.0, 4.0, 2.0, 0.0]])
    routing = route(logits, 4, renormalise=False, choice=choice, sigmoid=True)
    assert routing.ids.tolist() == [[1, 3, 2, 0]]
    torch.testing.assert_close(routing.weights, torch.tensor([[3.0, 3.0, 2.0, 1.0]]).sigmoid())


@pytest.mark.parametrize("run", [by_twin, by_kernel])
def test_weights_are_zero_if_all_sigmoids_are(run: Callable[..., Any]) -> None:
    routing = run(route, torch.full((1, 4), -200.0), 2, renormalise=True, sigmoid=True)
    assert routing.weights.tolist() == [[0.0, 0.0]]


def test_the_lowest_of_equal_experts_comes_first() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, float("-inf")]])
    assert route(logits, 6, renormalise=True).ids.tolist() == [[1, 3, 0, 2, 4, 5]]


def test_padding_is_not_counted_and_the_cpu_gets_only_its_experts() -> None:
    logits = torch.tensor([[0.0, 3, 2, 1], [9, 0, 8, 0], [9, 0, 8, 0]])
    counts = torch.tensor([1, 1, 1, 1], dtype=torch.int32)
    on_gpu = torch.tensor([-1, 0, -1, 4096])
    for_cpu = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    live = torch.tensor([2], dtype=torch.int32)
    routing = route(logits, 2, renormalise=True, on_gpu=on_gpu, live_tokens=live, counts=counts, for_cpu=for_cpu)
    assert routing.ids.tolist() == [[1, 2], [0, 2], [-1, -1]]
    assert for_cpu[0].tolist() == [[-1, 2], [0, 2], [-1, -1]]
    assert counts.tolist() == [2, 2, 3, 1]
    assert routing.weights.sum(-1).tolist() == pytest.approx([1, 1, 0])
    assert torch.equal(for_cpu[1], routing.weights)
    route(logits, 2, renormalise=True, live_tokens=live, for_cpu=for_cpu)
    assert torch.equal(for_cpu[0], routing.ids)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_softmax_have_weights_of_nan(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[0, 3] = bad
    logits[1] = float("-inf")
    routing = route(logits, 2, renormalise=False)
    assert routing.weights.isnan().all(-1).tolist() == [True, True, False]
    assert routing.ids.tolist() == [[0, 1]] * 3


def unusual(experts: int) -> torch.Tensor:
    """[9, experts] logits: random, equal, of both zeros, and rows without a softmax."""
    logits = torch.randn(9, experts)
    logits[1] = 0
    logits[2] = logits[2].round()
    logits[3, 1::2] = -0.0
    logits[3, ::2] = 0.0
    logits[4, 2:] = float("-inf")
    logits[5, 1] = float("nan")
    logits[6, 1] = -torch.tensor(float("nan"))
    logits[7, 2] = float("inf")
    logits[8] = float("-inf")
    return logits


# All experts may be chosen: of 5, whose block of 8 has places without an expert, and of 4, whose block is full.
@pytest.mark.parametrize(
    ("experts", "chosen", "dtype"),
    [
        (8, 2, torch.float32),
        (60, 4, torch.bfloat16),
        (128, 8, torch.float32),
        (5, 5, torch.bfloat16),
        (4, 4, torch.float32),
        (300, 1, torch.bfloat16),
    ],
)
def test_the_kernel_equals_its_twin(experts: int, chosen: int, dtype: torch.dtype) -> None:
    torch.manual_seed(experts)
    logits = unusual(experts).to(dtype)
    options = {
        "on_gpu": torch.where(torch.rand(experts) < 0.5, torch.arange(experts) * 64, -1),
        "live_tokens": torch.tensor([8], dtype=torch.int32),
        "counts": torch.ones(experts, dtype=torch.int32),
        "for_cpu": (torch.zeros(9, chosen, dtype=torch.int64), torch.zeros(9, chosen)),
    }
    choice = torch.randn(logits.shape)
    scorings: list[dict[str, Any]] = [{}, {"choice": choice, "scale": 2.5}, {"sigmoid": True}]
    scorings.append({"choice": choice, "sigmoid": True, "scale": 0.5})
    scorings.append({"scales": torch.rand(experts)})
    scorings += [{"jitter": 0.2}] if chosen == 2 else []
    for number, (scoring, renormalise) in enumerate(itertools.product(scorings, (True, False))):
        extras = options if number % 4 in (0, 3) else dict.fromkeys(options)
        ours, twin = clones(extras), clones(extras)
        routing = by_kernel(route, logits, chosen, renormalise=renormalise, **ours, **scoring)
        expected = route(logits, chosen, renormalise=renormalise, **twin, **scoring)
        assert torch.equal(routing.ids, expected.ids)
        assert_same(routing.weights, expected.weights)
        if ours["counts"] is not None:
            assert torch.equal(ours["counts"], twin["counts"])
            assert torch.equal(ours["for_cpu"][0], twin["for_cpu"][0])
            assert_same(ours["for_cpu"][1], routing.weights)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("run", [by_twin, by_kernel])
def test_the_input_of_experts_is_quantised_beside_it(run: Callable[..., Any], tokens: int) -> None:
    """The choice is the same as without. Rows of x are strided, and slabs are not a power of two."""
    logits, x = torch.randn(tokens, 12), torch.randn(tokens, 200).bfloat16()[:, :96]
    rows = Int8Rows.empty(tokens, 96, x.device)
    routing = run(route, logits, 3, renormalise=True, quantised=(x, rows))
    alone = run(route, logits, 3, renormalise=True)
    assert torch.equal(routing.ids, alone.ids) and torch.equal(routing.weights, alone.weights)
    expected = Int8Rows.quantise(x)
    assert torch.equal(rows.codes, expected.codes) and torch.equal(rows.sums, expected.sums)
    torch.testing.assert_close(rows.scales, expected.scales, rtol=1e-6, atol=0)
