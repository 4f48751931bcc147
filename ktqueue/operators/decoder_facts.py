"""What the compiled decoder needs to know about a causal language model of transformers.

Reads the module tree and the config, and refuses with a reason what the decoder does not compute. Knows no weights.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktqueue.operators.attention import window_of
from ktqueue.operators.experts import gate_facts, known_activations
from ktqueue.operators.latent_shape import LatentShape, latent_shape
from ktqueue.operators.linear_attention import LinearAttentionShape, linear_attention_shape
from ktqueue.operators.model_classes import CLASSES, LATENT_CLASSES
from ktqueue.operators.native import GateFacts

_CORRECTION = "e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """How a layer chooses the experts of a token.

    name: of the router's module below the layer; chosen: experts of a token; renormalise: the weights of the chosen
    experts add up to 1; sigmoid: an expert's score is the sigmoid of its logit, otherwise the softmax over all; bias:
    name below the layer of the vector that is added to the scores only to choose, or empty; scale: factor of the final
    weights; groups, groups_used: only experts of the best groups are chosen.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer. name: of its module; sliding_window 0: no limit; sinks: the softmax of each head has a further score
    without a value; router None: the MLP is dense; gate: of the experts or of the dense MLP; shared: name below the
    layer of an expert that sees every token, or empty; shared_gate: that expert has a gate."""

    name: str
    sliding_window: int
    sinks: bool
    router: RouterFacts | None
    gate: GateFacts
    shared: str = ""
    shared_gate: bool = False
    linear: LinearAttentionShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """The sizes of a model and its layers. dtype: of the computation; positions: that the model was trained for; clip
    0: q, k and v are not clamped; tied: the head is the embedding; gated: the output of attention is multiplied by the
    sigmoid of a gate, whose rows alternate with those of the query; centred: norms multiply by 1 + weight; latent: the
    shape of latent attention, equal in all layers. With latent attention, kv_heads and head_dim describe its cache."""

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
    qk_norm: bool
    tied: bool
    layers: tuple[LayerFacts, ...]
    gated: bool = False
    centred: bool = False
    latent: LatentShape | None = None


def facts_of(
    model: nn.Module, dtypes: Collection[torch.dtype] = (torch.float32,), classes: Collection[str] = CLASSES
) -> DecoderFacts:
    """Return the facts of a model of one of `classes` that computes in one of `dtypes`. Raises ValueError if the
    decoder does not compute a part of the model."""
    if type(model).__name__ not in classes:
        raise ValueError(f"it knows {', '.join(classes)}")
    config: Any = model.config
    body: Any = model.model
    found = {parameter.dtype for parameter in model.parameters()}
    if len(found) != 1 or not found <= {*dtypes}:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"it computes in {names}, but the model computes in another type")
    if _depends_on_length(body.rotary_emb):
        rope = body.rotary_emb.rope_type
        raise ValueError(f"rotary embeddings of type {rope!r} depend on the longest sequence of a batch")
    attention = next((layer.self_attn for layer in body.layers if hasattr(layer, "self_attn")), None)
    if attention is None:
        raise ValueError("none of its layers has keys and values")
    latent = latent_shape(attention) if type(model).__name__ in LATENT_CLASSES else None
    kv_heads, head_dim = (config.num_key_value_heads, attention.head_dim) if latent is None else (1, latent.key)
    if head_dim % 8 != 0:
        raise ValueError(f"its heads have {head_dim} dimensions, which is no multiple of 8")
    norms = [(name, epsilon) for name, module in model.named_modules() if (epsilon := _epsilon(module)) is not None]
    epsilons = {epsilon for name, epsilon in norms if not name.endswith("_a_layernorm")}
    if len(epsilons) != 1:
        raise ValueError(f"its norms have different epsilons: {sorted(epsilons)}")
    return DecoderFacts(
        dtype=found.pop(),
        hidden=config.hidden_size,
        vocabulary=model.lm_head.out_features,  # type: ignore[union-attr, arg-type]
        positions=config.max_position_embeddings,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scaling=attention.scaling,
        epsilon=epsilons.pop(),
        clip=getattr(config, "clip_qkv", None) or 0.0,
        qk_norm=hasattr(attention, "q_norm"),
        tied=bool(config.tie_word_embeddings),
        layers=tuple(_layer(f"model.layers.{i}", layer, config) for i, layer in enumerate(body.layers)),
        gated=attention.q_proj.out_features == 2 * attention.o_proj.in_features if latent is None else False,
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


def _depends_on_length(rotary: Any) -> bool:
    """Return whether the angles change with the longest sequence of a batch.

    Longrope has divisors for short and for long sequences. For a GGUF file (loading/gguf/rope.py) both are equal.
    """
    if rotary.rope_type != "longrope":
        return bool(rotary.rope_type == "dynamic")
    lists = rotary.config.rope_parameters
    return bool(lists["short_factor"] != lists["long_factor"])


def _layer(name: str, layer: Any, config: Any) -> LayerFacts:
    mlp, linear = layer.mlp, getattr(layer, "linear_attn", None)
    routed = hasattr(mlp, "experts")
    shared = next((child for child in ("shared_expert", "shared_experts") if hasattr(mlp, child)), "") if routed else ""
    parts = [getattr(mlp, child) for child in ("experts", shared) if child] if routed else [mlp]
    gates = {gate_facts(part) for part in parts}
    if len(gates) != 1 or (gate := gates.pop()) is None:
        raise ValueError(f"the activation of {name} is not one of {known_activations()}")
    return LayerFacts(
        name=name,
        sliding_window=window_of(layer.self_attn, config) if linear is None else 0,
        sinks=linear is None and hasattr(layer.self_attn, "sinks"),
        router=_router(mlp) if routed else None,
        gate=gate,
        shared=f"mlp.{shared}" if shared else "",
        shared_gate=hasattr(mlp, "shared_expert_gate"),
        linear=None if linear is None else linear_attention_shape(config),
    )


def _router(mlp: Any) -> RouterFacts:
    name = "gate" if hasattr(mlp, "gate") else "router"
    router = getattr(mlp, name)
    owner = next((f"mlp.{child}" for child, part in ((name, router), ("", mlp)) if hasattr(part, _CORRECTION)), None)
    facts: dict[str, Any] = {}
    if hasattr(router, "num_group"):  # DeepSeek's routers and their kin
        limited = owner is not None or router.topk_method == "group_limited_greedy"
        facts = {"scale": float(router.routed_scaling_factor)}
        facts |= {"groups": router.num_group, "groups_used": router.topk_group} if limited else {}
    elif hasattr(router, "router_scaling_factor"):
        facts = {"scale": float(router.router_scaling_factor)}
    return RouterFacts(
        name=f"mlp.{name}",
        experts=router.num_experts,
        chosen=router.top_k,
        renormalise=_renormalises(router),
        sigmoid=owner is not None,
        bias="" if owner is None else f"{owner.removesuffix('.')}.{_CORRECTION}",
        **facts,
    )


def _renormalises(router: Any) -> bool:
    if type(router).__name__ == "DeepseekV2TopkRouter":  # never, whatever its config says
        return False
    return bool(getattr(router, "norm_topk_prob", True))  # some always do, without an attribute
