"""What the decoders need to know about one layer of a causal language model of transformers.

Reads the layer's modules and the config, and refuses with a reason what the decoders do not compute. Knows no weights.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ktqueue.families.family import Family
from ktqueue.operators.attention import chunk_of, window_of
from ktqueue.operators.experts import gate_facts, known_activations
from ktqueue.operators.latent_shape import GROWTH, LatentShape, has_indexer
from ktqueue.operators.linear_attention import LinearAttentionShape, linear_attention_shape
from ktqueue.operators.native import GateFacts

_CORRECTION, _EXPERT_BIAS = "e_score_correction_bias", "expert_bias"
_POST, _POST_ATTENTION = "post_mlp_layernorm", "post_attention_layernorm"
_BEFORE_MLP, _AFTER_MLP = "pre_feedforward_layernorm", "post_feedforward_layernorm"  # of Gemma
_MLPS = ("mlp", "block_sparse_moe", "feed_forward")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """How a layer chooses the experts of a token.

    name: of the router's module below the layer; chosen: experts of a token; renormalise: the weights of the chosen
    experts add up to 1; sigmoid: an expert's score is the sigmoid of its logit, otherwise the softmax over all; bias:
    name below the layer of the vector that is added to the scores only to choose, or empty; scale: factor of the final
    weights; groups, groups_used: only experts of the best groups are chosen; jitter: see csrc/model/router.h;
    norm: name below the layer of the weights of a norm of the residual, whose result is the router's input after it is
    divided by the root of `hidden`; empty: its input is that of the MLP; scales: name below the layer of further
    factors of the final weights, one for each expert, or empty; weighted_input: the weights multiply the input of the
    experts, not what they add.
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
    norm: str = ""
    scales: str = ""
    weighted_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer.

    name: of its module; heads: of its queries; kv_heads, head_dim: of its keys and values, or of its latents; all are 0
    with linear attention;
    sliding_window 0: no limit; rotary_table: index of its kind in DecoderFacts.rotary_kinds; rotary_pairs: pairs of
    columns of each head that are rotated; sinks: the softmax of each head has a further score without a value;
    value_is_key: a value is its key before norm and rotation; value_norm: values are normalised, without weights;
    chooses: it has an indexer; chunk: see ScoreOptions; unit_norms: each head of query and key has a norm without
    weights; growth, period: a query at position p is multiplied by 1 + growth * log(1 + floor((p + 1) / period)).

    mlp: name below the layer of the dense MLP, if router is None; experts: of the module of the routed experts; gate:
    of the MLP and the shared expert; routed_gate: of the routed experts; shared: name below the layer of an expert that
    sees every token, or empty; shared_gate: that expert has a gate. The other names below the layer are those of norms,
    or empty: mlp_norm: of the input of MLP and experts; experts_norm: of the input of the routed experts, if it is
    another; shared_out_norm, experts_out_norm: of what the shared expert and the routed ones return;
    attention_out_norm, mlp_out_norm: of what attention and MLP add to the residual. out_scale: name below the layer of
    a factor of the residual after the layer, or empty.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int
    sinks: bool
    router: RouterFacts | None
    gate: GateFacts
    routed_gate: GateFacts
    shared: str = ""
    shared_gate: bool = False
    linear: LinearAttentionShape | None = None
    rotary_pairs: int = 0
    rotary_table: int = 0
    value_is_key: bool = False
    value_norm: bool = False
    mlp: str = "mlp"
    experts: str = "mlp.experts"
    chooses: bool = False
    mlp_norm: str = _POST_ATTENTION
    experts_norm: str = ""
    shared_out_norm: str = ""
    experts_out_norm: str = ""
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    out_scale: str = ""
    chunk: int = 0
    unit_norms: bool = False
    growth: float = 0.0
    period: float = 1.0

    @property
    def expert_gate(self) -> GateFacts:
        """The gate of the routed experts."""
        return replace(self.routed_gate, weighted_input=self.router is not None and self.router.weighted_input)


class RotaryKinds(NamedTuple):
    """Kinds of layers as in DecoderFacts, and the rotary pairs of each table."""

    kinds: tuple[str, ...]
    pairs: tuple[int, ...]


def layer_facts(
    name: str, layer: Any, config: Any, family: Family, rotary: RotaryKinds, latent: LatentShape | None
) -> LayerFacts:
    norms: dict[str, Any] = {}
    if hasattr(layer, "pre_mlp_layernorm"):  # AFMoE: norms before and after each part
        norms = {"mlp_norm": "pre_mlp_layernorm", "attention_out_norm": _POST_ATTENTION, "mlp_out_norm": _POST}
    elif hasattr(layer, _BEFORE_MLP):  # Gemma
        norms = {"mlp_norm": _BEFORE_MLP, "attention_out_norm": _POST_ATTENTION, "mlp_out_norm": _AFTER_MLP}
    return LayerFacts(
        name=name,
        **_mixer(layer, config, family, rotary, latent),
        **_feed_forward(name, layer),
        out_scale="layer_scalar" if hasattr(layer, "layer_scalar") else "",
        **norms,
    )


def _mixer(layer: Any, config: Any, family: Family, rotary: RotaryKinds, latent: LatentShape | None) -> dict[str, Any]:
    """Return the facts of a layer's attention."""
    if hasattr(layer, "linear_attn"):
        linear = linear_attention_shape(config)
        return {"heads": 0, "kv_heads": 0, "head_dim": 0, "sliding_window": 0, "sinks": False, "linear": linear}
    attention = layer.self_attn
    window = window_of(attention, config)
    rotated = bool(window) or not family.windows_rotated or attention.sliding_window is None
    growth: dict[str, Any] = {}
    if hasattr(layer, "pre_mlp_layernorm"):  # AFMoE
        rotated = attention.is_local_attention
    elif hasattr(attention, "use_rope"):  # Llama 4, SmolLM3
        rotated = bool(attention.use_rope)
        if getattr(attention, "attn_temperature_tuning", False) and not rotated:
            growth = {"growth": float(attention.attn_scale), "period": float(attention.floor_scale)}
    elif family.growing and not latent:
        rope = config.rope_parameters
        period = _counted_from_1(float(rope["original_max_position_embeddings"]), config.max_position_embeddings)
        growth = {"growth": float(rope[GROWTH]), "period": period}
    table = rotary.kinds.index(config.layer_types[attention.layer_idx]) if rotary.kinds else 0
    width = latent.key if latent else attention.head_dim
    kv_heads = 1
    if not latent:  # Phi-3 has one matrix for query, key and value
        keys = getattr(attention, "k_proj", None)
        kv_heads = config.num_key_value_heads if keys is None else keys.out_features // width
    return {
        "heads": getattr(attention, "num_heads", config.num_attention_heads),
        "kv_heads": kv_heads,
        "head_dim": width,
        "sliding_window": window,
        "rotary_table": table,
        "rotary_pairs": rotary.pairs[table] if rotated else 0,
        "sinks": getattr(attention, "sinks", None) is not None,
        "value_is_key": getattr(attention, "v_proj", attention) is None,
        "value_norm": hasattr(attention, "v_norm"),
        "chooses": has_indexer(attention),
        "chunk": chunk_of(attention, config),
        "unit_norms": hasattr(attention, "qk_norm"),
        **growth,
    }


def _counted_from_1(period: float, positions: int) -> float:
    """Return the number by which p + 1 has as many whole parts as p by `period`, for each p below `positions`: it is
    larger, by less than the least gap between p + 1 and a multiple."""
    return period * (1 + 1 / (2 * max(positions, period)))


def _feed_forward(name: str, layer: Any) -> dict[str, Any]:
    """Return the facts of a layer's MLP or experts. Raises ValueError for an unknown activation."""
    mlp_name = next(child for child in _MLPS if hasattr(layer, child))
    mlp = getattr(layer, mlp_name)
    found: dict[str, Any] = {"router": None, "mlp": mlp_name}
    parts = [mlp]
    if hasattr(layer, "experts"):  # Gemma 4: a dense MLP beside routed experts, each with its own norms
        parts = [mlp, layer.experts]
        found = {
            "router": _scaled_router(layer.router),
            "experts": "experts",
            "shared": mlp_name,
            "experts_norm": f"{_BEFORE_MLP}_2",
            "shared_out_norm": f"{_AFTER_MLP}_1",
            "experts_out_norm": f"{_AFTER_MLP}_2",
        }
    elif hasattr(mlp, "experts"):
        shared = next((child for child in _SHARED if getattr(mlp, child, None) is not None), "")
        parts = [getattr(mlp, child) for child in (shared, "experts") if child]
        found = {
            "router": _router(mlp, mlp_name),
            "experts": f"{mlp_name}.experts",
            "shared": f"{mlp_name}.{shared}" if shared else "",
            "shared_gate": hasattr(mlp, "shared_expert_gate"),
        }
    if hasattr(mlp, _POST):  # A.X-K1
        found["mlp_out_norm"] = f"{mlp_name}.{_POST}"
    gates = [gate_facts(part) for part in parts]
    if None in gates:
        raise ValueError(f"the activation of {name} is not one of {known_activations()}")
    return {**found, "gate": gates[0], "routed_gate": gates[-1]}


def _scaled_router(router: Any) -> RouterFacts:
    """Return the facts of a router of Gemma 4."""
    return RouterFacts(
        name="router.proj",
        experts=router.proj.out_features,
        chosen=router.config.top_k_experts,
        renormalise=True,
        norm="router.scale",
        scales="router.per_expert_scale",
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
    elif type(router).__name__ in ("LagunaTopKRouter", "Step3p7TopKRouter"):
        if getattr(router, "router_logit_softcapping", 0):
            raise ValueError(f"its routers limit their logits softly, to {router.router_logit_softcapping}")
        facts = {"scale": float(mlp.routed_scaling_factor)}
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
