"""What the compiled decoder needs to know about a causal language model of transformers.

Reads the module tree and the config, and refuses with a reason what the decoder does not compute. Knows no weights.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ktqueue.families.family import Family
from ktqueue.families.table import BY_CLASS, SUPPORTED
from ktqueue.operators.attention import cap_of, chunk_of, window_of
from ktqueue.operators.experts import gate_facts, known_activations
from ktqueue.operators.latent_shape import LatentShape, has_indexer, latent_shape
from ktqueue.operators.linear_attention import LinearAttentionShape, linear_attention_shape
from ktqueue.operators.native import GateFacts
from ktqueue.operators.rotary import original_length, rotary_kinds, rotary_pairs

MOST_HEAD_DIM = 1024  # of the attention kernels, csrc/kernels

_CORRECTION, _EXPERT_BIAS = "e_score_correction_bias", "expert_bias"
_FLOAT32 = re.compile(r"\.(?:gate|router)\.|\.indexer\.weights_proj\.|norm\.weight$|\.expert_bias$")
_QK_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
_GATE, _LOGIT_CAP = "gate_proj", "final_logit_softcapping"
_EMBEDDING, _POST, _POST_ATTENTION = "embedding_multiplier", "post_mlp_layernorm", "post_attention_layernorm"
_MLPS = ("mlp", "block_sparse_moe", "feed_forward")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """How a layer chooses the experts of a token.

    name: of the router's module below the layer; chosen: experts of a token; renormalise: the weights of the chosen
    experts add up to 1; sigmoid: an expert's score is the sigmoid of its logit, otherwise the softmax over all; bias:
    name below the layer of the vector that is added to the scores only to choose, or empty; scale: factor of the final
    weights; groups, groups_used: only experts of the best groups are chosen; jitter: see csrc/model/router.h;
    weighted_input: the weights multiply the input of the experts, not what they add.
    """

    name: str
    experts: int
    chosen: int
    renormalise: bool
    sigmoid: bool = False
    bias: str = ""
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    jitter: float = 0.0
    weighted_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer. name: of its module; sliding_window 0: no limit; rotary: query and key are rotated; sinks: the softmax
    of each head has a further score without a value; mlp: name below the layer of the MLP or of the module that has
    the experts; router None: the MLP is dense; gate: of the experts or of the dense MLP; shared: name below the layer
    of an expert that sees every token, or empty; shared_gate: that expert has a gate; chooses: it has an indexer;
    mlp_norm, attention_out_norm, mlp_out_norm: names below the layer of the norms of the MLP's input and of what
    attention and MLP add to the residual; empty: none; rotary_table: index of its kind in DecoderFacts.rotary_kinds;
    chunk: see ScoreOptions; unit_norms: each head of query and key has a norm without weights; growth, period: a query
    at position p is multiplied by 1 + growth * log(1 + floor((p + 1) / period))."""

    name: str
    sliding_window: int
    sinks: bool
    router: RouterFacts | None
    gate: GateFacts
    shared: str = ""
    shared_gate: bool = False
    linear: LinearAttentionShape | None = None
    rotary: bool = True
    mlp: str = "mlp"
    chooses: bool = False
    mlp_norm: str = _POST_ATTENTION
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    rotary_table: int = 0
    chunk: int = 0
    unit_norms: bool = False
    growth: float = 0.0
    period: float = 1.0

    @property
    def expert_gate(self) -> GateFacts:
        """The gate of the routed experts."""
        return replace(self.gate, weighted_input=self.router is not None and self.router.weighted_input)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """The sizes of a model and its layers.

    dtype: of the computation; positions: that the model was trained for; clip 0: q, k and v are not clamped; qk_norm:
    names below the attention of the norms of q and k, or empty; norm_after_rotary: they follow the rotation;
    interleaved: number of the first columns of each head of q and k whose rotary pairs are adjacent rows of their
    matrices; tied: the head is the embedding; gated: the output of attention is multiplied by the sigmoid of a gate,
    whose rows alternate with those of the query; fused: the rows of query, key and value are in one matrix, and so are
    those of gate and up (Phi-3); gate: name below the attention of a matrix of its own for that gate,
    or empty; centred: norms multiply by 1 + weight; latent: the shape of latent
    attention, equal in all layers. With latent attention, kv_heads and head_dim describe its cache. rotary_kinds: kinds
    of layers that have rotary tables of their own; empty: all layers have the same. score_cap, logit_cap: a score of
    attention or a logit x becomes cap * tanh(x / cap); 0: it does not.

    embedding_scale, logit_scale: factors of the embedding and of the logits. A factor r of what each sublayer adds to
    the residual is in embedding_scale and epsilon: the residual is stored divided by r, which no norm notices if its
    epsilon is divided by r * r.
    """

    dtype: torch.dtype
    hidden: int
    vocabulary: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    epsilon: float
    clip: float
    qk_norm: tuple[str, str] | tuple[()]
    tied: bool
    layers: tuple[LayerFacts, ...]
    gated: bool = False
    fused: bool = False
    gate: str = ""
    centred: bool = False
    latent: LatentShape | None = None
    norm_after_rotary: bool = False
    interleaved: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    rotary_kinds: tuple[str, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0


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
    kv_heads, head_dim = (config.num_key_value_heads, attention.head_dim) if latent is None else (1, latent.key)
    if head_dim % 8 != 0:
        raise ValueError(f"its heads have {head_dim} dimensions, which is no multiple of 8")
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"its heads have {head_dim} dimensions, more than {MOST_HEAD_DIM:,}")
    norms = [(name, epsilon) for name, module in model.named_modules() if (epsilon := _epsilon(module)) is not None]
    epsilons = {epsilon for name, epsilon in norms if not name.endswith(("_a_layernorm", ".indexer.k_norm"))}
    if len(epsilons) != 1:
        raise ValueError(f"its norms have different epsilons: {sorted(epsilons)}")
    qk_norm = next((names for names in _QK_NORMS if hasattr(attention, names[0])), ())
    rotary_columns = 2 * rotary_pairs(body.rotary_emb, kinds)
    if family.norm_after_rotary and rotary_columns != head_dim:
        raise ValueError(f"only {rotary_columns} of {head_dim} columns are rotated before the norm of a head")
    added = _factor(config, "residual_multiplier")
    if added != 1 and qk_norm:
        raise ValueError("a residual multiplier and norms of query and key are not computed together")
    layers = tuple(_layer(f"model.layers.{i}", layer, config, family, kinds) for i, layer in enumerate(body.layers))
    if any(layer.growth for layer in layers) and original_length(config):
        raise ValueError("longrope and queries that grow with their position are not computed together")
    return DecoderFacts(
        dtype=found_dtype,
        hidden=config.hidden_size,
        vocabulary=model.lm_head.out_features,  # type: ignore[union-attr, arg-type]
        positions=config.max_position_embeddings,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
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
        gated=latent is None and not fused and attention.q_proj.out_features == 2 * attention.o_proj.in_features,
        fused=fused,
        gate=_GATE if hasattr(attention, _GATE) else "",
        centred=_is_centred(body.norm),
        latent=latent,
    )


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


def _layer(name: str, layer: Any, config: Any, family: Family, kinds: tuple[str, ...]) -> LayerFacts:
    mlp_name = next(child for child in _MLPS if hasattr(layer, child))
    mlp = getattr(layer, mlp_name)
    linear = getattr(layer, "linear_attn", None)
    routed = hasattr(mlp, "experts")
    shared = next((child for child in _SHARED if getattr(mlp, child, None) is not None), "") if routed else ""
    parts = [getattr(mlp, child) for child in ("experts", shared) if child] if routed else [mlp]
    gates = {gate_facts(part) for part in parts}
    if len(gates) != 1 or (gate := gates.pop()) is None:
        raise ValueError(f"the activation of {name} is not one of {known_activations()}")
    window = window_of(layer.self_attn, config) if linear is None else 0
    rotary = bool(window) or not family.windows_rotated or layer.self_attn.sliding_window is None
    growth, period = 0.0, 1.0
    attention: Any = getattr(layer, "self_attn", None)
    if type(attention).__name__ == "Llama4TextAttention":
        rotary = bool(attention.use_rope)
        if attention.attn_temperature_tuning and not rotary:
            growth, period = float(attention.attn_scale), float(attention.floor_scale)
    norms = {}
    if hasattr(mlp, _POST):  # A.X-K1
        norms = {"mlp_out_norm": f"{mlp_name}.{_POST}"}
    elif hasattr(layer, "pre_mlp_layernorm"):  # AFMoE: norms before and after each part
        rotary = layer.self_attn.is_local_attention
        norms = {"mlp_norm": "pre_mlp_layernorm", "attention_out_norm": _POST_ATTENTION, "mlp_out_norm": _POST}
    elif hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and 3
        before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
        norms = {"mlp_norm": before, "attention_out_norm": _POST_ATTENTION, "mlp_out_norm": after}
    return LayerFacts(
        name=name,
        sliding_window=window,
        rotary=rotary,
        sinks=linear is None and hasattr(layer.self_attn, "sinks"),
        mlp=mlp_name,
        router=_router(mlp, mlp_name) if routed else None,
        gate=gate,
        shared=f"{mlp_name}.{shared}" if shared else "",
        shared_gate=hasattr(mlp, "shared_expert_gate"),
        linear=None if linear is None else linear_attention_shape(config),
        chooses=linear is None and has_indexer(layer.self_attn),
        rotary_table=kinds.index(layer.self_attn.layer_type) if kinds else 0,
        chunk=0 if linear is not None else chunk_of(layer.self_attn, config),
        unit_norms=hasattr(attention, "qk_norm"),
        growth=growth,
        period=period,
        **norms,
    )


def _router(mlp: Any, mlp_name: str) -> RouterFacts:
    name = "gate" if hasattr(mlp, "gate") else "router"
    router = getattr(mlp, name)
    statics = getattr(router, "moe_statics", None)  # ERNIE's, whose scores are the softmax
    owners = ((f"{name}.", router), (f"{name}.moe_statics.", statics), ("", mlp))
    bias = next((f"{mlp_name}.{owner}{_CORRECTION}" for owner, part in owners if hasattr(part, _CORRECTION)), "")
    if hasattr(mlp, _EXPERT_BIAS):
        bias = f"{mlp_name}.{_EXPERT_BIAS}"
    facts: dict[str, Any] = {}
    if hasattr(router, "num_group"):  # DeepSeek's routers and their kin
        limited = bool(bias) or getattr(router, "topk_method", "") == "group_limited_greedy"
        facts = {"scale": float(router.routed_scaling_factor)}
        facts |= {"groups": router.num_group, "groups_used": router.topk_group} if limited else {}
    elif scale := getattr(router, "router_scaling_factor", getattr(router, "route_scale", None)):
        facts = {"scale": float(scale)}
    elif type(router).__name__ == "PhimoeTopKRouter":
        if router.top_k != 2 or router.router_jitter_noise <= 0:
            raise ValueError("its routers choose two experts within a positive router_jitter_noise, these do not")
        facts = {"jitter": float(router.router_jitter_noise)}
    elif type(router).__name__ == "Llama4Router":
        facts = {"weighted_input": True}
    return RouterFacts(
        name=".".join([mlp_name, name, *(child for child in ("wg", "gate") if hasattr(router, child))]),
        experts=router.num_experts,
        chosen=router.top_k,
        renormalise=_renormalises(router),
        sigmoid=(bool(bias) and statics is None) or "weighted_input" in facts,
        bias=bias,
        **facts,
    )


def _renormalises(router: Any) -> bool:
    if type(router).__name__ in ("DeepseekV2TopkRouter", "Llama4Router"):  # never, whatever the config says
        return False
    return bool(getattr(router, "norm_topk_prob", True))  # some always do, without an attribute
