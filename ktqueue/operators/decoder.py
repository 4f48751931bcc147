"""CpuDecoder: a whole causal language model as one compiled call per step.

It replaces the model that transformers built: token ids go in, logits come out, and no Python runs between layers.
Rotary tables come from the model's own module. Knows no file.
"""

from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from ktqueue_kernels import _kernels
from torch import nn

from ktqueue.core.expert_work import ExpertUses, ExpertWork
from ktqueue.operators import native
from ktqueue.operators.base import KernelOptions, Operator, kernel_options
from ktqueue.operators.decoder_facts import DecoderFacts, chosen_by_all, facts_of
from ktqueue.operators.decoder_weights import in_own_order, norm_weights, one_expert, router_norm
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.latent_shape import INDEX_NORM_EPSILON, IndexerShape, LatentShape, growth_factors
from ktqueue.operators.latent_weights import read_indexer, read_latent_attention
from ktqueue.operators.layer_facts import LayerFacts
from ktqueue.operators.linear import load_linear, pack_linear
from ktqueue.operators.linear_attention import LinearAttentionShape, read_linear_attention, split_query_and_gate
from ktqueue.operators.next_token_layer import NextTokenLayer
from ktqueue.operators.packed import ExpertWeights, ModuleWeights, PackedMatrix
from ktqueue.operators.rotary import rotary_tables
from ktqueue.operators.step import DecoderOutput, StepContext

_NONE: native.Floats = np.empty(0, np.float32)


class CpuDecoder(Operator):
    """Called like the causal language model that it replaces, always with a step. The cache must be float32.

    Results do not depend on the thread count, on other rows or on chunk borders, except as native.Linear says.
    """

    def __init__(self, facts: DecoderFacts, rotary: nn.Module, options: KernelOptions) -> None:
        super().__init__()
        self.facts = facts
        self.rotary = rotary
        self._options = options
        self._decoder: _kernels.Decoder | None = None
        self.embedding_bytes = 0
        self.expert_bytes = 0  # of routed experts
        self._dense_bytes = 0
        self._kv: KVCache | None = None
        self._choices: npt.NDArray[np.uint16] = np.empty((0, 0, 0), np.uint16)
        self._hidden: torch.Tensor | None = None

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Build from a model of one of the SUPPORTED classes. Options: `activations`, `isa`. Raises ValueError."""
        chosen = kernel_options("CpuDecoder", options)
        try:
            facts = facts_of(module)
        except ValueError as error:
            name = type(module).__name__
            raise ValueError(
                f"{name} cannot be replaced by CpuDecoder: {error} (rules/modules.yaml does without it)"
            ) from error
        return cls(facts, module.model.rotary_emb, chosen)  # type: ignore[union-attr, arg-type]

    def load(self, weights: ModuleWeights) -> None:
        """Pack all matrices. The embedding keeps its stored format. Raises ValueError if a weight does not fit."""
        facts = self.facts
        weights = in_own_order(weights, facts)
        stored = weights.matrix("model.embed_tokens.weight")
        # A copy, because the file may be truncated or overwritten: reading its map would then raise SIGBUS or give
        # other weights.
        self._embedding = replace(stored, data=stored.data.copy())
        self._head = load_linear(weights, "lm_head", **self._options)
        self.embedding_bytes = self._embedding.data.nbytes
        self._dense_bytes = self._head.bytes
        self._decoder = self._make_decoder(norm_weights(weights, facts, "model.norm"))
        for layer in facts.layers:
            self._add_layer(self._decoder, layer, weights)

    def load_next_token_layer(self, weights: ModuleWeights) -> NextTokenLayer:
        """Load the layer behind the model's own, which predicts the token after the next. Call it after `load`.

        Raises ValueError if a weight does not fit.
        """
        facts = self.facts
        weights = in_own_order(weights, facts)
        layer = facts.further_layer
        decoder = self._make_decoder(norm_weights(weights, facts, f"{layer.name}.shared_head.norm"))
        self._add_layer(decoder, layer, weights)
        joining = load_linear(weights, f"{layer.name}.eh_proj", **self._options)
        self._dense_bytes += joining.bytes
        names = "enorm", "hnorm", "shared_head.norm"
        norms = [norm_weights(weights, facts, f"{layer.name}.{name}") for name in names]
        return NextTokenLayer(self, decoder, self._embedding, joining, norms)

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """See NextTokenBase."""
        self._hidden, self._kv = hidden, None

    def bind(self, decoder: _kernels.Decoder, kv: KVCache) -> None:
        """See NextTokenBase."""
        positions = min(kv.pages * kv.layout.page_size, self.facts.positions)
        tables = rotary_tables(self.rotary, positions, self.facts.rotary_kinds)
        decoder.set_rotary(*(table.numpy() for table in tables))
        keys = [keys.numpy() for keys in kv.keys]
        values = keys if self.facts.latent else [values.numpy() for values in kv.values]
        decoder.set_cache(keys, values, [keys.numpy() for keys in kv.index_keys])
        decoder.set_states([recent.numpy() for recent in kv.recent], [states.numpy() for states in kv.states])

    def _make_decoder(self, norm: native.Floats) -> _kernels.Decoder:
        """A decoder with the model's embedding and head, whose last norm is `norm`, without layers."""
        facts, embedding = self.facts, self._embedding
        rare: dict[str, Any] = {}  # what few families have
        if facts.value_scale != 1:
            rare["value_scale"] = facts.value_scale
        if facts.softplus_gate:
            rare["softplus_gate"] = True
        return _kernels.Decoder(
            hidden=embedding.columns,
            scaling=facts.scaling,
            epsilon=facts.epsilon,
            embedding_scale=facts.embedding_scale,
            norm_after_rotary=facts.norm_after_rotary,
            score_cap=facts.score_cap,
            logit_cap=facts.logit_cap,
            quant=embedding.quant,
            embedding=embedding.data,
            norm=norm,
            head=self._head.bound,
            logit_scale=facts.logit_scale,
            isa=self._options["isa"],
            **rare,
        )

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed weights and of the embedding."""
        return {"cpu": self.embedding_bytes + self.expert_bytes + self._dense_bytes}

    @property
    def expert_layers_run(self) -> int:
        """Layers with routed experts run so far, over all steps."""
        return self.expert_work().cpu_runs

    @property
    def experts_used(self) -> int:
        """Sum over these runs of the number of different experts used."""
        return self.expert_work().cpu_experts

    def expert_work(self) -> ExpertWork:
        """See CountsExperts."""
        return ExpertWork(*self._ready().expert_totals())

    def expert_uses(self) -> ExpertUses | None:
        """See CountsExperts."""
        return [layer for layer in self._ready().expert_uses() if layer]

    def record_choices(self, tokens: int) -> None:
        """See RecordsChoices."""
        chosen = chosen_by_all(self.facts)
        self._choices = np.zeros((sum(bool(layer) for layer in self._ready().expert_uses()), tokens, chosen), np.uint16)
        self._ready().record_choices(self._choices)

    def choices(self, scored: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.uint16]:
        """See RecordsChoices."""
        found = self._choices[:, scored]
        if self.facts.layers[-1].router is not None and self._hidden is None and len(scored) < tokens:
            found[-1] = self._choices[-1, : len(scored)]
        return found.swapaxes(0, 1)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        step: StepContext,
        use_cache: bool = False,
    ) -> DecoderOutput:
        """Run one step. input_ids, position_ids: [1, tokens] int64; logits_to_keep: [scored] int64, rising.

        Raises ValueError for an index out of range, before the cache is written, and RuntimeError before `load`.
        """
        decoder = self._ready()
        if step.kv is not self._kv:
            self._bind(decoder, step.kv)
        logits = torch.empty(1, len(logits_to_keep), self.facts.vocabulary)
        decoder.forward(
            input_ids.numpy(), position_ids.numpy(), logits_to_keep.numpy(), *step.arrays(), logits[0].numpy()
        )
        return DecoderOutput(logits)

    def _ready(self) -> _kernels.Decoder:
        if self._decoder is None:
            raise RuntimeError("CpuDecoder has no weights yet")
        return self._decoder

    def _bind(self, decoder: _kernels.Decoder, kv: KVCache) -> None:
        """Use `kv` from now on."""
        self.bind(decoder, kv)
        if self._hidden is not None:
            decoder.set_hidden(self._hidden.numpy())
        self._kv = kv

    def _add_layer(self, decoder: _kernels.Decoder, layer: LayerFacts, weights: ModuleWeights) -> None:
        options = self._options
        # For a router or an indexer, where nearly equal scores decide between experts or keys.
        exact: KernelOptions = {**options, "activations": "float32"}

        def counted(packed: native.Linear) -> _kernels.Linear:
            self._dense_bytes += packed.bytes
            return packed.bound

        def linear(name: str, options: KernelOptions = options) -> _kernels.Linear:
            return counted(load_linear(weights, f"{layer.name}.{name}", **options))

        def matrix(stored: PackedMatrix, bias: native.Floats | None = None) -> _kernels.Linear:
            return counted(pack_linear(stored, bias, **options))

        def expert_layer(experts: ExpertWeights, gate: native.GateFacts) -> native.ExpertLayer:
            return native.ExpertLayer(experts, gate, **options)

        def dense_mlp(name: str) -> _kernels.ExpertLayer:
            packed = expert_layer(one_expert(weights, f"{layer.name}.{name}"), layer.gate)
            self._dense_bytes += packed.bytes
            return packed.bound

        def routed_experts() -> _kernels.ExpertLayer:
            packed = expert_layer(weights.experts(f"{layer.name}.{layer.experts}"), layer.expert_gate)
            self.expert_bytes += packed.bytes
            return packed.bound

        def vector(name: str) -> native.Floats:
            return weights.vector(f"{layer.name}.{name}")

        def norm(name: str) -> native.Floats:
            return norm_weights(weights, self.facts, f"{layer.name}.{name}")

        def attention() -> dict[str, Any]:
            queries = {"q": linear("self_attn.q_proj"), "gate": None} if not self.facts.gated else gated_queries()
            if self.facts.gate:
                queries["gate"] = linear(f"self_attn.{self.facts.gate}")
            norms = self.facts.qk_norm
            ones = np.ones(layer.head_dim, np.float32) if layer.unit_norms else _NONE
            return {
                **queries,
                "k": linear("self_attn.k_proj"),
                "v": None if layer.value_is_key else linear("self_attn.v_proj"),
                "o": linear("self_attn.o_proj"),
                "linear_attention": None,
                "latent_attention": None,
                "q_norm": norm(f"self_attn.{norms[0]}") if norms else ones,
                "k_norm": norm(f"self_attn.{norms[1]}") if norms else ones,
                "v_norm": np.ones(layer.head_dim, np.float32) if layer.value_norm else _NONE,
                "sinks": vector("self_attn.sinks") if layer.sinks else _NONE,
            }

        def gated_queries() -> dict[str, Any]:
            name, heads = f"{layer.name}.self_attn.q_proj", layer.heads
            bias = weights.vector(f"{name}.bias").reshape(heads, 2, -1) if weights.has(f"{name}.bias") else None
            parts = split_query_and_gate(weights.matrix(f"{name}.weight"), heads)
            biases = [None if bias is None else np.ascontiguousarray(bias[:, i]).reshape(-1) for i in range(2)]
            return {"q": matrix(parts[0], biases[0]), "gate": matrix(parts[1], biases[1])}

        def linear_attention(shape: LinearAttentionShape) -> dict[str, Any]:
            parts = read_linear_attention(weights, f"{layer.name}.linear_attn", shape)
            bound = _kernels.LinearAttention(
                key_heads=shape.key_heads,
                value_heads=shape.value_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                tiled=shape.tiled,
                qkv=matrix(parts.qkv),
                gate=matrix(parts.gate),
                decay=matrix(parts.decay),
                rate=matrix(parts.rate),
                convolution=parts.convolution,
                decay_rates=parts.decay_rates,
                decay_biases=parts.decay_biases,
                norm=parts.norm,
            )
            return {**unused, "o": linear("linear_attn.out_proj"), "linear_attention": bound}

        def indexer(shape: IndexerShape, rotary: int) -> _kernels.Indexer:
            name = "self_attn.indexer"
            parts = read_indexer(weights, f"{layer.name}.{name}", shape, rotary)
            return _kernels.Indexer(
                heads=shape.heads,
                columns=shape.key,
                query=matrix(parts.query),
                key=matrix(parts.key),
                weights=linear(f"{name}.weights_proj", exact),
                norm=parts.norm,
                epsilon=INDEX_NORM_EPSILON,
            )

        def latent_attention(shape: LatentShape) -> dict[str, Any]:
            parts = read_latent_attention(weights, f"{layer.name}.self_attn", shape)
            bound = _kernels.LatentAttention(
                heads=shape.heads,
                latent=shape.latent,
                plain=shape.plain,
                rotary=shape.rotary,
                value=shape.value,
                low_rank=matrix(*parts.low_rank) if parts.low_rank else None,
                query=matrix(*parts.query),
                key=matrix(*parts.key),
                absorb=matrix(parts.absorb),
                expand=matrix(parts.expand),
                low_rank_norm=vector("self_attn.q_a_layernorm.weight") if parts.low_rank else _NONE,
                latent_norm=vector("self_attn.kv_a_layernorm.weight"),
                epsilon=shape.epsilon,
                growth=shape.growth,
                period=shape.period,
                chosen=shape.indexer.chosen if shape.indexer else 0,
                indexer=indexer(shape.indexer, shape.rotary) if shape.indexer and layer.chooses else None,
            )
            return {**unused, "o": linear("self_attn.o_proj"), "latent_attention": bound}

        unused = {
            **dict.fromkeys(("q", "k", "v", "gate", "linear_attention", "latent_attention")),
            **dict.fromkeys(("q_norm", "k_norm", "v_norm", "sinks"), _NONE),
        }
        if layer.linear:
            mixer = linear_attention(layer.linear)
        else:
            mixer = latent_attention(self.facts.latent) if self.facts.latent else attention()

        router, mlp = layer.router, layer.shared or ("" if layer.router else layer.mlp)
        optional_norms: dict[str, Any] = {
            name: norm(part) if (part := getattr(layer, name)) else _NONE
            for name in ("experts_norm", "shared_out_norm", "experts_out_norm", "attention_out_norm", "mlp_out_norm")
        }
        decoder.add_layer(
            heads=layer.heads if self.facts.latent is None else self.facts.latent.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            attention_norm=norm("input_layernorm"),
            **mixer,
            rotary_table=layer.rotary_table,
            rotary_pairs=layer.rotary_pairs,
            clip=self.facts.clip,
            sliding_window=layer.sliding_window,
            chunk=layer.chunk,
            growth=layer.growth,
            period=layer.period,
            mlp_norm=norm(layer.mlp_norm),
            **optional_norms,
            mlp=dense_mlp(mlp) if mlp else None,
            shared_gate=linear(f"{layer.shared}_gate") if layer.shared_gate else None,
            router=linear(router.name, exact) if router else None,
            experts=routed_experts() if router else None,
            experts_per_token=router.chosen if router else 0,
            renormalise=router is not None and router.renormalise,
            sigmoid=router is not None and router.sigmoid,
            scale=router.scale if router else 1.0,
            groups=router.groups if router else 1,
            groups_used=router.groups_used if router else 1,
            bias=vector(router.bias) if router and router.bias else _NONE,
            jitter=router.jitter if router else 0.0,
            scales=vector(router.scales) if router and router.scales else _NONE,
            router_norm=router_norm(weights, layer) if router and router.norm else _NONE,
            out_scale=float(vector(layer.out_scale)[0]) if layer.out_scale else 1.0,
        )


def query_growth(facts: DecoderFacts, positions: int) -> torch.Tensor:
    """Return the factors of the queries in layers that have them, [positions] float32; empty if no layer has them.

    Raises ValueError if layers differ.
    """
    kinds = {(layer.growth, layer.period) for layer in facts.layers if layer.growth}
    if not kinds:
        return torch.empty(0)
    if len(kinds) > 1:
        raise ValueError(f"queries of its layers grow differently: {sorted(kinds)}")
    ((growth, period),) = kinds
    return growth_factors(torch.arange(1, positions + 1), growth, period)
