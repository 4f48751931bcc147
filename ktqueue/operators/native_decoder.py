"""Typed wrapper of the compiled decoder: a whole decoder-only transformer as one call. Knows no module and no file."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from ktqueue_kernels import _kernels

from ktqueue.operators.native import ExpertLayer, Floats, Integers, Linear
from ktqueue.operators.packed import PackedMatrix

NONE = np.empty(0, np.float32)  # no such norm


class Decoder:
    """Token ids to logits through embedding, layers, final norm and head; see csrc/model/decoder.h.

    `embedding` is read in place and kept alive; `head`: [vocabulary, hidden]. `scaling` is of attention scores,
    `epsilon` of all norms. Raises ValueError if shapes disagree.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scaling: float,
        epsilon: float,
        embedding: PackedMatrix,
        norm: Floats,
        head: Linear,
        isa: str = "",
    ) -> None:
        self._decoder = _kernels.Decoder(
            hidden=embedding.columns,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scaling=scaling,
            epsilon=epsilon,
            quant=embedding.quant,
            embedding=embedding.data,
            norm=norm,
            head=head.bound,
            isa=isa,
        )

    def add_layer(
        self,
        *,
        attention_norm: Floats,
        q: Linear,
        k: Linear,
        v: Linear,
        o: Linear,
        q_norm: Floats,
        k_norm: Floats,
        clip: float,
        sliding_window: int,
        mlp_norm: Floats,
        mlp: ExpertLayer | None,
        shared_gate: Linear | None,
        router: Linear | None,
        experts: ExpertLayer | None,
        experts_per_token: int,
        renormalise: bool,
    ) -> None:
        """Append a layer. `q_norm`, `k_norm`: NONE, [head_dim] for each head, or of the whole projection. `clip` 0: q,
        k and v are not clamped; `sliding_window` 0: no limit. `mlp`: the dense MLP or the shared expert, as a layer of
        one expert; `router`, `experts`: the routed ones. Raises ValueError."""
        self._decoder.add_layer(
            attention_norm=attention_norm,
            q=q.bound,
            k=k.bound,
            v=v.bound,
            o=o.bound,
            q_norm=q_norm,
            k_norm=k_norm,
            clip=clip,
            sliding_window=sliding_window,
            mlp_norm=mlp_norm,
            mlp=mlp.bound if mlp else None,
            shared_gate=shared_gate.bound if shared_gate else None,
            router=router.bound if router else None,
            experts=experts.bound if experts else None,
            experts_per_token=experts_per_token,
            renormalise=renormalise,
        )

    def set_rotary(self, cosine: Floats, sine: Floats) -> None:
        """The rotary table, [positions, half] each, read in place and kept alive. Raises ValueError."""
        self._decoder.set_rotary(cosine, sine)

    def set_cache(self, keys: Sequence[Floats], values: Sequence[Floats]) -> None:
        """The cache that steps use from now on, of each layer [pages, page_size, kv_heads, head_dim]; kept alive.

        Raises ValueError.
        """
        self._decoder.set_cache(keys, values)

    def forward(
        self,
        input_ids: Integers,
        position_ids: Integers,
        scored: Integers,
        query_starts: npt.NDArray[np.int32],
        context_lengths: npt.NDArray[np.int32],
        page_table: npt.NDArray[np.int32],
        slot_mapping: Integers,
        logits: Floats,
    ) -> None:
        """One step. input_ids, position_ids: [1, tokens]; `scored`: [scored], rising, places of the tokens whose
        logits [scored, vocabulary] are wanted; the index arrays are as in StepContext. A token whose numbers are not
        finite spoils its own sequence only. Raises ValueError, before anything is written.
        """
        self._decoder.forward(
            input_ids, position_ids, scored, query_starts, context_lengths, page_table, slot_mapping, logits
        )

    @property
    def expert_layers_run(self) -> int:
        """Layers with routed experts that have been run, all steps together."""
        return int(self._decoder.expert_layers_run)

    @property
    def experts_used(self) -> int:
        """Different experts that those runs used, added up."""
        return int(self._decoder.experts_used)
