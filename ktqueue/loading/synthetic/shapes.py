"""Shapes of real models, and the tensors of a GGUF file with such a shape. Knows no weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ktqueue.loading.weight_formats import BLOCKS

# transformers configs by the name of the model with this shape. tiny, mid and tiny-latent are our own, for tests.
_QWEN3 = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_DEEPSEEK = {
    "model_type": "deepseek_v2", "rms_norm_eps": 1e-6, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3, "hidden_size": 256, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 512,
    },
    "mid": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8192,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936,
    },
    "tiny-latent": {
        **_DEEPSEEK, "hidden_size": 256, "num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "kv_lora_rank": 256,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 512,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK, "hidden_size": 2048, "num_hidden_layers": 27, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "intermediate_size": 10944, "num_attention_heads": 16, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 32000,
    },
}  # fmt: skip
MIX = "Q4_K_M"  # llama.cpp's mix of Q4_K and Q6_K; any other quantisation is one format for all matrices
_ROUTER_GAIN, _HEAD_GAIN = 2.0, 3.0
# Of matrices that add to the residual. All layers together add about the residual's own size.
_ATTENTION_GAIN, _DOWN_GAIN = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class SyntheticTensor:
    """One tensor of a file. `deviation` is the standard deviation of its weights."""

    name: str
    quant: str
    shape: tuple[int, ...]
    deviation: float


class _TensorMaker:
    """Makes the tensors of one model: names, formats that fit, deviations."""

    def __init__(self, config: dict[str, Any], quant: str) -> None:
        self.config = config
        self._quant = quant
        self._layers = config["num_hidden_layers"]
        self.share = (2 * self._layers) ** -0.5

    def norm(self, name: str, size: int) -> SyntheticTensor:
        return SyntheticTensor(f"{name}.weight", "F32", (size,), 0.1)

    def matrix(self, name: str, *shape: int, layer: int = 0, gain: float = 1.0) -> SyntheticTensor:
        wanted = _choose(self._quant, name.rpartition(".")[2], layer, self._layers)
        fitting = (quant for quant in (wanted, "Q8_0") if shape[-1] % BLOCKS[quant][0] == 0)
        return SyntheticTensor(f"{name}.weight", next(fitting, "F16"), shape, gain / shape[-1] ** 0.5)


def tensors_of(config: dict[str, Any], quant: str) -> Iterator[SyntheticTensor]:
    """Yield all tensors of a model of that config, in file order.

    `quant` is MIX or a storage format. A matrix whose rows are not a multiple of its block is Q8_0, or F16.
    """
    make = _TensorMaker(config, quant)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield make.matrix("token_embd", vocab, hidden, gain=hidden**0.5)
    for i in range(config["num_hidden_layers"]):
        yield make.norm(f"blk.{i}.attn_norm", hidden)
        yield from (_latent_attention if "kv_lora_rank" in config else _grouped_attention)(make, i)
        yield make.norm(f"blk.{i}.ffn_norm", hidden)
        if i < config.get("first_k_dense_replace", 0):
            yield from _mlp(make, i, "", config["intermediate_size"])
        else:
            yield from _experts(make, i)
    yield make.norm("output_norm", hidden)
    yield make.matrix("output", vocab, hidden, gain=_HEAD_GAIN)


def _grouped_attention(make: _TensorMaker, i: int) -> Iterator[SyntheticTensor]:
    config, block = make.config, f"blk.{i}"
    hidden = config["hidden_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    yield make.matrix(f"{block}.attn_q", queries, hidden, layer=i)
    yield make.matrix(f"{block}.attn_k", keys, hidden, layer=i)
    yield make.matrix(f"{block}.attn_v", keys, hidden, layer=i)
    yield make.matrix(f"{block}.attn_output", hidden, queries, layer=i, gain=_ATTENTION_GAIN * make.share)
    if config["model_type"] == "qwen3_moe":
        yield make.norm(f"{block}.attn_q_norm", config["head_dim"])
        yield make.norm(f"{block}.attn_k_norm", config["head_dim"])


def _latent_attention(make: _TensorMaker, i: int) -> Iterator[SyntheticTensor]:
    config, block = make.config, f"blk.{i}"
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield make.matrix(f"{block}.attn_q", heads * (plain + rotary), hidden, layer=i)
    yield make.matrix(f"{block}.attn_kv_a_mqa", latent + rotary, hidden, layer=i)
    yield make.norm(f"{block}.attn_kv_a_norm", latent)
    yield make.matrix(f"{block}.attn_kv_b", heads * (plain + value), latent, layer=i)
    yield make.matrix(f"{block}.attn_output", hidden, heads * value, layer=i, gain=_ATTENTION_GAIN * make.share)


def _experts(make: _TensorMaker, i: int) -> Iterator[SyntheticTensor]:
    config, block = make.config, f"blk.{i}"
    hidden = config["hidden_size"]
    experts = next(config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield SyntheticTensor(f"{block}.ffn_gate_inp.weight", "F32", (experts, hidden), _ROUTER_GAIN / hidden**0.5)
    yield make.matrix(f"{block}.ffn_gate_exps", experts, width, hidden, layer=i)
    yield make.matrix(f"{block}.ffn_up_exps", experts, width, hidden, layer=i)
    yield make.matrix(f"{block}.ffn_down_exps", experts, hidden, width, layer=i, gain=_DOWN_GAIN * make.share)
    if shared := config.get("n_shared_experts"):
        yield from _mlp(make, i, "_shexp", shared * width)


def _mlp(make: _TensorMaker, i: int, suffix: str, width: int) -> Iterator[SyntheticTensor]:
    block, hidden = f"blk.{i}", make.config["hidden_size"]
    yield make.matrix(f"{block}.ffn_gate{suffix}", width, hidden, layer=i)
    yield make.matrix(f"{block}.ffn_up{suffix}", width, hidden, layer=i)
    yield make.matrix(f"{block}.ffn_down{suffix}", hidden, width, layer=i, gain=_DOWN_GAIN * make.share)


def _choose(quant: str, role: str, layer: int, layers: int) -> str:
    """Return the format of a matrix.

    In its mix, llama.cpp uses Q6_K for the logits. It also uses Q6_K for values and down in the first eighth of the
    layers, in the last eighth, and in every third layer between.
    """
    if quant != MIX:
        return quant
    eighth = layers // 8
    higher_precision = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if role == "output" or (higher_precision and role in ("attn_v", "ffn_down_exps")) else "Q4_K"
