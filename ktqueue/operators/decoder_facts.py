"""What the compiled decoder needs to know about a causal language model of transformers.

Reads the module tree and the config, and refuses with a reason what the decoder does not compute. Knows no weights.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ktqueue.families.table import BY_CLASS, SUPPORTED
from ktqueue.operators.attention import cap_of
from ktqueue.operators.latent_shape import LatentShape, latent_shape
from ktqueue.operators.layer_facts import LayerFacts, RotaryKinds, layer_facts
from ktqueue.operators.rotary import original_length, rotary_kinds, rotary_pairs

MOST_HEAD_DIM = 1024  # of the attention kernels, csrc/kernels

_FLOAT32 = re.compile(r"\.(?:gate|router)\.|\.indexer\.weights_proj\.|norm\.weight$|\.expert_bias$")
_QK_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
_GATES, _LOGIT_CAP = ("gate_proj", "g_proj"), "final_logit_softcapping"
_EMBEDDING = "embedding_multiplier"
_UNKNOWN_PARTS = {  # of some sizes of Gemma 4, by the key of the config
    "hidden_size_per_layer_input": "embeddings for each layer",
    "num_kv_shared_layers": "layers that share keys and values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """The sizes of a model and its layers.

    dtype: of the computation; positions: that the model was trained for; heads: of queries, unless a layer has others;
    clip 0: q, k and v are not clamped; qk_norm: names below the attention of the norms of q and k, or empty;
    norm_after_rotary: they follow the rotation; interleaved: number of the first columns of each head of q and k whose
    rotary pairs are adjacent rows of their matrices; tied: the head is the embedding; gated: the output of attention is
    multiplied by the sigmoid of a gate, whose rows alternate with those of the query; fused: the rows of query, key and
    value are in one matrix, and so are those of gate and up (Phi-3); gate: name below the attention of a matrix of its
    own for that gate, or empty; head_gate: it has one number for each head; softplus_gate: its softplus multiplies, not
    its sigmoid; centred: norms multiply by 1 + weight; float_norms: they multiply by weights before they round; latent:
    the shape of latent attention, equal in all layers. rotary_kinds: kinds of layers that have rotary tables of their
    own; empty: all layers have the same. score_cap, logit_cap: a score of attention or a logit x becomes cap *
    tanh(x / cap); 0: it does not. value_dim: columns of a value; 0: as many as a key has. value_scale: factor of
    values. normed_further: see Family.

    embedding_scale, logit_scale: factors of the embedding and of the logits. A factor r of what each sublayer adds to
    the residual is in embedding_scale and epsilon: the residual is stored divided by r, which no norm notices if its
    epsilon is divided by r * r.
    """

    dtype: torch.dtype
    hidden: int
    vocabulary: int
    positions: int
    heads: int
    scaling: float
    epsilon: float
    clip: float
    qk_norm: tuple[str, str] | tuple[()]
    tied: bool
    layers: tuple[LayerFacts, ...]
    gated: bool = False
    fused: bool = False
    gate: str = ""
    head_gate: bool = False
    softplus_gate: bool = False
    centred: bool = False
    float_norms: bool = False
    latent: LatentShape | None = None
    norm_after_rotary: bool = False
    interleaved: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    rotary_kinds: tuple[str, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    value_dim: int = 0
    value_scale: float = 1.0
    normed_further: bool = False

    @property
    def further_layer(self) -> LayerFacts:
        """The layer behind the model's own, which predicts further tokens: like the last one with keys and values."""
        last = [layer for layer in self.layers if layer.linear is None][-1]
        return replace(last, name=f"model.layers.{len(self.layers)}")


def facts_of(
    model: nn.Module, dtypes: Collection[torch.dtype] = (torch.float32,), decoder: str = "CpuDecoder"
) -> DecoderFacts:
    """Return the facts of a model that computes in one of `dtypes`, for CpuDecoder or GpuDecoder. Raises ValueError if
    the decoder does not compute the model's class or a part of it."""
    family = BY_CLASS.get(type(model).__name__)
    if family is None or family.class_name not in SUPPORTED[decoder]:
        raise ValueError(f"it knows {', '.join(SUPPORTED[decoder])}")
    config: Any = model.config
    body: Any = model.model
    # Some models compute routers, norms, or the weights of an indexer's heads in float32, whatever their type.
    found = {parameter.dtype for name, parameter in model.named_parameters() if not _FLOAT32.search(name)}
    if len(found) != 1 or not found <= {*dtypes}:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"it computes in {names}, but the model computes in another type")
    kinds = rotary_kinds(body.rotary_emb)
    (found_dtype,) = found
    attention = next((layer.self_attn for layer in body.layers if hasattr(layer, "self_attn")), None)
    if attention is None:
        raise ValueError("none of its layers has keys and values")
    latent = latent_shape(attention) if family.latent else None
    fused = hasattr(attention, "qkv_proj")
    rotary = RotaryKinds(kinds, rotary_pairs(body.rotary_emb, kinds))
    for name, part in _UNKNOWN_PARTS.items():
        if getattr(config, name, None):
            raise ValueError(f"it has {part}")
    layers = tuple(
        layer_facts(f"model.layers.{i}", layer, config, family, rotary, latent) for i, layer in enumerate(body.layers)
    )
    for head_dim in {layer.head_dim for layer in layers}:
        if head_dim % 8 != 0:
            raise ValueError(f"its heads have {head_dim} dimensions, which is no multiple of 8")
        if head_dim > MOST_HEAD_DIM:
            raise ValueError(f"its heads have {head_dim} dimensions, more than {MOST_HEAD_DIM:,}")
    norms = [(name, epsilon) for name, module in model.named_modules() if (epsilon := _epsilon(module)) is not None]
    epsilons = {epsilon for name, epsilon in norms if not name.endswith(("_a_layernorm", ".indexer.k_norm"))}
    if len(epsilons) != 1:
        raise ValueError(f"its norms have different epsilons: {sorted(epsilons)}")
    qk_norm = next((names for names in _QK_NORMS if hasattr(attention, names[0])), ())
    value_dim = 0 if latent else _value_dim(attention)
    is_plain = not (latent or fused or value_dim)
    rotary_columns = 2 * max(rotary.pairs)
    if family.norm_after_rotary and rotary_columns != attention.head_dim:
        raise ValueError(f"only {rotary_columns} of {attention.head_dim} columns are rotated before the norm of a head")
    added = _factor(config, "residual_multiplier")
    if added != 1 and qk_norm:
        raise ValueError("a residual multiplier and norms of query and key are not computed together")
    if any(layer.growth for layer in layers) and original_length(config):
        raise ValueError("longrope and queries that grow with their position are not computed together")
    return DecoderFacts(
        dtype=found_dtype,
        hidden=config.hidden_size,
        vocabulary=model.lm_head.out_features,  # type: ignore[union-attr, arg-type]
        positions=config.max_position_embeddings,
        heads=config.num_attention_heads,
        scaling=attention.scaling,
        epsilon=epsilons.pop() / added**2,
        clip=getattr(config, "clip_qkv", None) or 0.0,
        qk_norm=qk_norm,
        norm_after_rotary=family.norm_after_rotary,
        interleaved=rotary_columns if family.interleaved else 0,
        embedding_scale=_embedding_scale(model, found_dtype) / added,
        logit_scale=1 / _factor(config, "logits_scaling"),
        logit_cap=_logit_cap(config),
        score_cap=cap_of(attention),
        rotary_kinds=kinds,
        tied=bool(config.tie_word_embeddings) and getattr(model.lm_head, "bias", None) is None,
        layers=layers,
        gated=is_plain and attention.q_proj.out_features == 2 * attention.o_proj.in_features,
        fused=fused,
        gate=next((name for name in _GATES if hasattr(attention, name)), ""),
        head_gate=getattr(attention, "gate_per_head", False),
        softplus_gate=type(attention).__name__ == "LagunaAttention",
        centred=_is_centred(body.norm),
        float_norms=_multiplies_before_rounding(body.norm),
        latent=latent,
        value_dim=value_dim,
        value_scale=getattr(attention, "v_scale", 1.0),
        normed_further=family.normed_further,
    )


def _value_dim(attention: Any) -> int:
    """Return DecoderFacts.value_dim for a module of attention. Raises ValueError if values are longer than keys."""
    value_dim = getattr(attention, "v_head_dim", attention.head_dim)  # MiMo-V2
    if value_dim > attention.head_dim:
        raise ValueError(f"its values have {value_dim} columns, more than the {attention.head_dim} of its keys")
    return 0 if value_dim == attention.head_dim else int(value_dim)


def _epsilon(module: Any) -> float | None:
    """Return the epsilon of a norm; None for another module."""
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return None if found is None else float(found)


def _is_centred(norm: Any) -> bool:
    """Return whether a norm of transformers multiplies by 1 + weight."""
    with torch.no_grad():
        one = type(norm)(8)
        one.weight.zero_()
        return bool(one(torch.ones(8)).abs().sum() > 0)


def _multiplies_before_rounding(norm: Any) -> bool:
    """Return whether an RMSNorm of transformers multiplies by its weights in float32, as that of Gemma 4 does."""
    with torch.no_grad():
        one = type(norm)(256).bfloat16()
        weight = torch.linspace(0.5, 1.5, 256).bfloat16()
        one.weight.copy_(weight)
        x = torch.linspace(-2, 3, 256).bfloat16()
        scale = torch.rsqrt(x.float().square().mean() + (_epsilon(one) or 0))
        return torch.equal(one(x), (x.float() * scale * weight.float()).bfloat16())


def _embedding_scale(model: Any, dtype: torch.dtype) -> float:
    """Return the factor of the embedding. Gemma's is rounded to `dtype`."""
    scale = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        return float(torch.tensor(scale).to(dtype))
    config = model.config
    return float(config.hidden_size**0.5) if getattr(config, "mup_enabled", False) else _factor(config, _EMBEDDING)


def _logit_cap(config: Any) -> float:
    """Return the soft limit of logits, 0 for models without one. Raises ValueError if it is not above 0."""
    return 0.0 if getattr(config, _LOGIT_CAP, None) is None else _factor(config, _LOGIT_CAP)


def _factor(config: Any, name: str) -> float:
    """Return a number of the config, 1 for models without it. Raises ValueError if it is not above 0."""
    value = getattr(config, name, None)
    factor = 1.0 if value is None else float(value)
    if factor <= 0:
        raise ValueError(f"{name} must be above 0, got {factor}")
    return factor


def chosen_by_all(facts: DecoderFacts) -> int:
    """How many experts each layer with routed experts chooses for a token. Raises ValueError if that differs."""
    counts = {layer.router.chosen for layer in facts.layers if layer.router is not None}
    if len(counts) != 1:
        raise ValueError("its layers choose different numbers of experts" if counts else "it has no routed experts")
    return counts.pop()
