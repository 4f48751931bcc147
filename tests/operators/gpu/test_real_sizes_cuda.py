"""GpuDecoder on a GPU with heads and experts of the sizes that models have, in half precision: experts on the CPU, on
both and on the GPU, eager steps and captured ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import (
    COMMON,
    SEQUENCES,
    SIGMOID,
    Cache,
    answers,
    feed,
    make_planner_for,
    random_model,
    token_error,
)
from latent_families import YARN

from ktqueue.operators.gpu.decoder import GpuDecoder

from .captured_steps import Captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # kernels are compiled for every size
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "first_k_dense_replace": 0,
}


def sizes(hidden: int, heads: int, kv_heads: int, head_dim: int | None, expert: int, chosen: int) -> dict[str, Any]:
    """The names of sizes that most configs share. head_dim None: another name has it."""
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "moe_intermediate_size": expert,
        "num_experts_per_tok": chosen,
        **({} if head_dim is None else {"head_dim": head_dim}),
    }


GROUPS = {**SIGMOID, "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**sizes(1024, 32, 4, 128, 768, 8), "num_experts": 12, "norm_topk_prob": True},
    "qwen2_moe": {**sizes(1024, 16, 16, 128, 1408, 4), "num_experts": 8, "shared_expert_intermediate_size": 5632},
    "mixtral": {**sizes(1024, 32, 8, 128, 0, 2), "intermediate_size": 14336, "num_local_experts": 3},
    "olmoe": {**sizes(2048, 16, 16, None, 0, 8), "intermediate_size": 1024, "num_experts": 12, "clip_qkv": 2.0},
    "glm4_moe": {
        **GROUPS,
        **sizes(1024, 96, 8, 128, 1408, 8),
        "n_routed_experts": 12,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {**GROUPS, **sizes(1024, 32, 32, 128, 1408, 6), "n_routed_experts": 12, "n_shared_experts": 2},
    "minimax_m2": {
        **sizes(1024, 48, 8, 128, 0, 8),
        "intermediate_size": 1536,
        "num_local_experts": 12,
        "partial_rotary_factor": 0.5,
    },
    "gpt_oss": {
        **sizes(2880, 64, 8, 64, 0, 4),
        "intermediate_size": 2880,
        "num_local_experts": 6,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    },
    "gemma4_text": {
        **sizes(1024, 16, 8, 256, 704, 8),
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 8,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "deepseek_v2": {
        **LATENT,
        **sizes(1024, 16, 16, None, 1408, 6),
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **GROUPS,
        **LATENT,
        **sizes(1024, 64, 64, None, 2048, 8),
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
"""By model type, as transformers' configs call the sizes. Hidden sizes are real for olmoe and gpt_oss only, and there
are fewer experts: the files of these layers would have many GB."""
CASES = (  # of even and of odd models: types, formats of the weights, which are exact, and shares of experts on the GPU
    ((torch.bfloat16, "BF16", 0.5), (torch.float16, "F16", 0.0)),
    ((torch.bfloat16, "BF16", 0.5), (torch.float16, "F16", 1.0)),
)


@pytest.fixture(scope="module", autouse=True)
def device() -> str:
    return "cuda"


def decoded(decoder: GpuDecoder, *, captured: bool) -> dict[str, torch.Tensor]:
    """Feed the sequences: all but some last tokens at once, then a token of each in a step. Returns their logits."""
    steps = 4
    cache = Cache(decoder, device="cuda", planner=make_planner_for)
    cache.step({name: ids[:-steps] for name, ids in SEQUENCES.items()})
    found: dict[str, list[torch.Tensor]] = {name: [] for name in SEQUENCES}
    if captured:
        cache._free.remove(cache.kv.pages - 1)  # the scratch page: see Captured
    step: Callable[[dict[str, int]], torch.Tensor]
    step = Captured(decoder, cache).step if captured else lambda rows: cache.step({n: [t] for n, t in rows.items()})
    for place in range(-steps, 0):
        logits = step({name: ids[place] for name, ids in SEQUENCES.items()})
        decoder.after_step()
        for name, row in zip(SEQUENCES, logits, strict=True):
            found[name].append(row[None])
    return {name: torch.cat(rows) for name, rows in found.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_each_type_and_placement_is_as_exact_as_transformers(kind: str, make_decoder: Callable[..., Any]) -> None:
    """Both are compared with float32 arithmetic on the same rounded weights."""
    spread = 1.2 / MODELS[kind]["hidden_size"] ** 0.5
    own = {**COMMON, "num_hidden_layers": 2, **MODELS[kind], "initializer_range": spread}
    model = random_model(kind, own, "cuda")
    for dtype, quant, share in CASES[list(MODELS).index(kind) % 2]:
        rounded = copy.deepcopy(model).to(dtype)
        expected = answers(copy.deepcopy(rounded).float())
        bound = 1.25 * token_error(answers(rounded), expected) + 1e-5
        rounded = rounded.cpu()
        experts = sum(p.nbytes for name, p in rounded.named_parameters() if ".experts." in name)
        decoder = make_decoder(rounded, quant, expert_memory_bytes=int(1.01 * share * experts))
        with torch.inference_mode():
            error = token_error(feed(decoder, device="cuda", planner=make_planner_for), expected)
            assert error < bound, f"{dtype}, {share} of the experts on the GPU"
            statistics = decoder.statistics()
            assert abs(statistics["experts_on_gpu"] - share * statistics["experts"]) <= 1
            eager, replayed = (decoded(decoder, captured=captured) for captured in (False, True))
            last = {name: logits[-4:] for name, logits in expected.items()}
            assert token_error(eager, last) < 2 * bound
            assert token_error(replayed, last) < 2 * bound
        decoder.close()
