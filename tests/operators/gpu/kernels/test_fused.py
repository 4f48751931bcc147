"""The fused operators' twins compute what the modules of transformers do."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention, OlmoeRotaryEmbedding, OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.gpu.kernels.router import Scoring, route

DTYPES = (torch.float32, torch.bfloat16)


def sizes(**changes: Any) -> dict[str, Any]:
    """Of a config. Renormalisation and norms are each model's own."""
    usual = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return usual | changes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_norm(dtype: torch.dtype) -> None:
    norm = Qwen3MoeRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    residual, added = torch.randn(2, 5, 48).to(dtype)
    hidden = residual + added
    given = residual.clone()
    copy = torch.empty(5, 48)
    normed = add_rms_norm(given, norm.weight.data, 1e-5, added=added, copy=copy)
    assert torch.equal(given, hidden)
    assert torch.equal(normed, norm(hidden).data)
    assert torch.equal(copy, normed.float())
    assert torch.equal(add_rms_norm(given, norm.weight.data, 1e-5), normed)
    assert torch.equal(given, hidden)


def test_what_is_added_is_rounded_once() -> None:
    residual, shared = torch.randn(2, 3, 48).bfloat16()
    added, partials, gate = torch.randn(3, 48), torch.randn(3, 4, 48), torch.randn(3, 1).bfloat16()
    total = residual.float() + added + partials.sum(1) + torch.sigmoid(gate.float()) * shared.float()
    options = {"added": added, "partials": partials, "shared": shared, "shared_gate": gate}
    normed = add_rms_norm(residual, torch.ones(48), 1e-6, **options)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(residual, total.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3MoeAttention, Qwen3MoeConfig(**sizes(head_dim=16))),
        (OlmoeAttention, OlmoeConfig(**sizes(clip_qkv=1.0))),
        (OlmoeAttention, OlmoeConfig(**sizes())),
        (MixtralAttention, MixtralConfig(**sizes(head_dim=24))),
    ],
    ids=["per head", "whole, clipped", "whole", "none"],
)
def test_query_key_value(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> None:
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen[:] = (states[0].transpose(0, 1) for states in (query, key, value))
        return query.transpose(1, 2), None

    AttentionInterface.register("keep", keep)
    config._attn_implementation = "keep"
    attention: Any = kind(config, 0).to(dtype)
    for parameter in attention.parameters():
        parameter.data.normal_()
    rotary = OlmoeRotaryEmbedding(config)  # alike in all of them
    hidden = torch.randn(1, 7, 48).to(dtype)
    positions = torch.tensor([3, 0, 9, 10, 11, 63, 1])
    attention(hidden, rotary(hidden, positions[None]), None)

    half = attention.head_dim // 2
    cosine, sine = (table[0, :, :half].contiguous() for table in rotary(torch.ones(1), torch.arange(64)[None]))
    keys, values = torch.zeros(2, 3, 4, 2, 2 * half, dtype=dtype)
    slots = torch.tensor([0, 5, 4, 11, 7, 6, 2])
    query = qk_norm_rope_append(
        torch.cat([project(hidden[0]) for project in (attention.q_proj, attention.k_proj, attention.v_proj)], -1).data,
        heads=4,
        kv_heads=2,
        q_norm=attention.q_norm.weight.data if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.data if hasattr(attention, "k_norm") else None,
        epsilon=config.rms_norm_eps,
        cosine=cosine,
        sine=sine,
        positions=positions,
        slot_mapping=slots,
        keys=keys,
        values=values,
        clip=getattr(config, "clip_qkv", None) or 0.0,
    )
    # In bf16 transformers rounds the tables, both products and their sum; here only the sum is.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-1}
    torch.testing.assert_close(query, seen[0].data, **close)
    torch.testing.assert_close(keys.view(12, 2, -1)[slots], seen[1].data, **close)
    assert torch.equal(values.view(12, 2, -1)[slots], seen[2].data)
    assert not values.view(12, 2, -1)[[1, 3, 8, 9, 10]].any()


def test_an_fp8_cache_saturates(qkv: Any) -> None:
    case = qkv(cache=torch.float8_e4m3fn)
    qk_norm_rope_append(**case)
    wide = qkv()
    qk_norm_rope_append(**wide)
    for name in ("keys", "values"):
        assert wide[name].abs().max() > 600
        assert torch.equal(case[name].float(), wide[name].clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MixtralTopKRouter, MixtralConfig(**sizes(num_local_experts=8, num_experts_per_tok=2))),
        (Qwen3MoeTopKRouter, Qwen3MoeConfig(**sizes(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True))),
        (OlmoeTopKRouter, OlmoeConfig(**sizes(num_experts=64, num_experts_per_tok=8))),
        (Qwen2MoeTopKRouter, Qwen2MoeConfig(**sizes(num_experts=60, num_experts_per_tok=4))),
    ],
    ids=["mixtral", "qwen3", "olmoe", "qwen2"],
)
def test_routers(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> None:
    router: Any = kind(config).to(dtype)
    router.weight.data.normal_(std=0.3)
    logits, weights, ids = router(torch.randn(9, 48).to(dtype))
    routing = route(logits.data, ids.shape[1], renormalise=getattr(router, "norm_topk_prob", True))
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights.to(weights.dtype), weights.data)
    assert torch.equal(routing.cpu_ids, routing.ids)
    # Where logits are equal, which bf16 ones are at times, transformers' choice is not defined.
    torch.testing.assert_close(logits.gather(1, routing.ids), logits.gather(1, ids), rtol=0, atol=0)
    assert len(routing.ids[0].unique()) == ids.shape[1]


GROUPS = {"n_group": 8, "topk_group": 3}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (DeepseekV2TopkRouter, DeepseekV2Config(**sizes(n_routed_experts=64, num_experts_per_tok=6))),
        (
            DeepseekV2TopkRouter,
            DeepseekV2Config(
                **sizes(n_routed_experts=64, num_experts_per_tok=6, routed_scaling_factor=16.0, **GROUPS),
                topk_method="group_limited_greedy",
            ),
        ),
        (DeepseekV3TopkRouter, DeepseekV3Config(**sizes(n_routed_experts=64, num_experts_per_tok=8, **GROUPS))),
        (
            DeepseekV3TopkRouter,
            DeepseekV3Config(
                **sizes(n_routed_experts=64, num_experts_per_tok=6, n_group=1, topk_group=1, norm_topk_prob=False)
            ),
        ),
    ],
    ids=["V2-Lite", "V2", "V3", "one group"],
)
def test_routers_with_scores_of_their_own(kind: type[nn.Module], config: Any) -> None:
    router: Any = kind(config)
    router.weight.data.normal_(std=0.3)
    facts = {} if kind is DeepseekV2TopkRouter else {"sigmoid": True}
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
    assert (routing.weights.diff(dim=-1) <= 0).all()  # whatever they were chosen by: deferral takes the last as least


def test_the_chosen_come_by_weight_not_by_what_chose_them() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    choice = torch.tensor([[5.0, 1.0, 4.0, 2.0, 0.0]])
    routing = route(logits, 4, renormalise=False, choice=choice, sigmoid=True)
    assert routing.ids.tolist() == [[1, 3, 2, 0]]
    torch.testing.assert_close(routing.weights, torch.tensor([[3.0, 3.0, 2.0, 1.0]]).sigmoid())


def test_sigmoids_that_are_all_zero_weigh_nothing() -> None:
    routing = route(torch.full((1, 4), -200.0), 2, renormalise=True, sigmoid=True)
    assert routing.weights.tolist() == [[0.0, 0.0]]


def test_a_shared_expert_without_a_gate_is_added_whole() -> None:
    residual, weight, shared = torch.randn(3, 32), torch.rand(32), torch.randn(3, 32)
    total = residual + shared
    add_rms_norm(residual, weight, 1e-6, shared=shared)
    assert torch.equal(residual, total)


def test_the_lowest_of_equal_experts_comes_first() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, float("-inf")]])
    assert route(logits, 6, renormalise=True).ids.tolist() == [[1, 3, 0, 2, 4, 5]]


def test_padding_counts_and_experts_on_the_gpu() -> None:
    logits = torch.tensor([[0.0, 3, 2, 1], [9, 0, 8, 0], [9, 0, 8, 0]])
    counts = torch.tensor([1, 1, 1, 1], dtype=torch.int32)
    on_gpu = torch.tensor([-1, 0, -1, 4096])
    copies = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    live = torch.tensor([2], dtype=torch.int32)
    routing = route(logits, 2, renormalise=True, on_gpu=on_gpu, live_tokens=live, counts=counts, copies=copies)
    assert routing.ids.tolist() == [[1, 2], [0, 2], [-1, -1]]
    assert routing.cpu_ids.tolist() == [[-1, 2], [0, 2], [-1, -1]]
    assert counts.tolist() == [2, 2, 3, 1]
    assert routing.weights.sum(-1).tolist() == pytest.approx([1, 1, 0])
    assert torch.equal(copies[0], routing.cpu_ids)
    assert torch.equal(copies[1], routing.weights)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_softmax_are_nan(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[0, 3] = bad
    logits[1] = float("-inf")
    routing = route(logits, 2, renormalise=False)
    assert routing.weights.isnan().all(-1).tolist() == [True, True, False]
    assert routing.ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_dense_mlps(ours: Any, theirs: str, dtype: torch.dtype) -> None:
    mlp = LlamaMLP(LlamaConfig(**sizes(hidden_act=theirs))).to(dtype)
    mlp.down_proj = nn.Identity()
    x = torch.randn(5, 48).to(dtype)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), -1).data
    torch.testing.assert_close(gated(ours, gate_up), mlp(x).data)


def test_no_tokens(qkv: Any) -> None:
    assert qk_norm_rope_append(**qkv(tokens=0)).shape == (0, 4, 16)
    assert route(torch.zeros(0, 4), 2, renormalise=True).ids.shape == (0, 2)
    assert add_rms_norm(torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)


def test_a_linear_of_a_few_rows_is_a_linear() -> None:
    x, weight, bias = torch.randn(3, 48), torch.randn(7, 48), torch.randn(7)
    assert torch.equal(few_rows_linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    x, weight = x.bfloat16(), weight.bfloat16()
    sums = few_rows_linear(x, weight, dtype=torch.float32)
    assert torch.equal(sums, x.float() @ weight.float().T)
    assert not torch.equal(sums, few_rows_linear(x, weight).float())


def test_what_does_not_fit_is_refused(qkv: Any) -> None:
    rows = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"add_rms_norm does not take residual \[2, 8\] torch.float32"):
        add_rms_norm(rows, torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="add_rms_norm"):
        add_rms_norm(rows, torch.zeros(8), 1e-6, shared_gate=rows[:, :1])
    with pytest.raises(ValueError, match="route to 9"):
        route(rows, 9, renormalise=True)
    with pytest.raises(ValueError, match="counts"):
        route(rows, 2, renormalise=True, counts=torch.zeros(8))
    with pytest.raises(ValueError, match="gated by relu"):
        gated("relu", rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="qk_norm_rope_append"):
        qk_norm_rope_append(**qkv() | {"sine": torch.zeros(64, 4)})
