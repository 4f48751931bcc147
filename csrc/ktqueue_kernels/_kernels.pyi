"""Types of the compiled extension. ktqueue.operators.native documents its functions and classes, native_handoff its
Handoff."""

from collections.abc import Sequence
from typing import Any

Packed = tuple[str, int, int, Sequence[Any], Any]

def isa() -> str: ...
def isas() -> list[str]: ...
def set_batch_invariant(on: bool) -> None: ...
def tile_rows(quant: str, isa: str) -> int: ...
def default_threads() -> int: ...
def threads() -> int: ...
def nodes() -> int: ...
def set_threads(threads: int, spin_microseconds: int, pin: str = "auto", pretend_nodes: int = 0) -> None: ...
def row_bytes(quant: str, columns: int) -> int: ...
def packed_bytes(quant: str, rows: int, columns: int) -> int: ...
def dequantize(quant: str, data: Any, out: Any) -> None: ...
def quantize(quant: str, values: Any, importance: Any | None, out: Any) -> None: ...
def paged_attention(
    query: Any,
    key: Any,
    value: Any,
    cache_keys: Any,
    cache_values: Any,
    query_starts: Any,
    context_lengths: Any,
    page_table: Any,
    slot_mapping: Any,
    scaling: float,
    score_cap: float,
    sliding_window: int,
    chunk: int,
    sinks: Any | None,
    out: Any,
    isa: str = "",
) -> None: ...
def mask_logits(logits: Any, masks: Any, rows: Sequence[int]) -> None: ...
def peaks() -> list[tuple[str, str, str]]: ...
def peak(isa: str, arithmetic: str, threads: int, seconds: float, repeats: int) -> float: ...

class ReadProbe:
    def __init__(self, size: int) -> None: ...
    def measure(self, size: int, threads: int, rounds: int, repeats: int, prefetch: int) -> float: ...
    @property
    def bytes(self) -> int: ...

class ExpertLayer:
    def __init__(
        self,
        gate: Packed,
        up: Packed,
        down: Packed,
        activation: str,
        alpha: float,
        limit: float,
        weighted_input: bool,
        activations: str,
        isa: str,
    ) -> None: ...
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any, out: Any) -> None: ...
    def ranges(self, expert: int) -> list[tuple[int, int]]: ...
    def prefetch_lines(self, experts: Sequence[int], most_bytes: int, stop_after: int) -> list[list[int]]: ...
    @property
    def isa(self) -> str: ...
    @property
    def bytes(self) -> int: ...

class Handoff:
    host_function: int
    def __init__(
        self,
        hidden: int,
        experts_per_token: int,
        max_tokens: int,
        memory: tuple[int, int, int, int],
        kept: Any,
        serve: bool,
        idle_seconds: float,
        stuck_seconds: float,
    ) -> None: ...
    def add_layer(self, layer: ExpertLayer) -> int: ...
    def run(self, word: int) -> None: ...
    def host_task(self, word: int) -> int: ...
    def x_offset(self, tokens: int) -> int: ...
    def predicted_offset(self, tokens: int) -> int: ...
    def take_error(self) -> str | None: ...
    def statistics(self) -> tuple[int, int, float, int, int, int, int]: ...
    def uses(self) -> list[list[int]]: ...
    def close(self, seconds: float) -> bool: ...

class Linear:
    def __init__(
        self, quant: str, rows: int, columns: int, data: Any, bias: Any, activations: str, isa: str
    ) -> None: ...
    def forward(self, x: Any, out: Any) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class LinearAttention:
    """Linear attention of a layer of a Decoder: csrc/model/linear_attention.h. Raises ValueError when it is added."""

    def __init__(
        self,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        tiled: bool,
        qkv: Linear,
        gate: Linear,
        decay: Linear,
        rate: Linear,
        convolution: Any,
        decay_rates: Any,
        decay_biases: Any,
        norm: Any,
    ) -> None: ...

class Indexer:
    """The indexer of a layer of a Decoder: csrc/model/indexer.h. Raises ValueError when its layer is added."""

    def __init__(
        self,
        *,
        heads: int,
        columns: int,
        query: Linear,
        key: Linear,
        weights: Linear,
        norm: Any,
        epsilon: float,
    ) -> None: ...

class LatentAttention:
    """Latent attention of a layer of a Decoder: csrc/model/latent_attention.h. Raises ValueError when it is added."""

    def __init__(
        self,
        *,
        heads: int,
        latent: int,
        plain: int,
        rotary: int,
        value: int,
        low_rank: Linear | None,
        query: Linear,
        key: Linear,
        absorb: Linear,
        expand: Linear,
        low_rank_norm: Any,
        latent_norm: Any,
        epsilon: float,
        growth: float,
        period: float,
        chosen: int,
        indexer: Indexer | None,
    ) -> None: ...

class Decoder:
    """Token ids to logits through embedding, layers, final norm and head: csrc/model/decoder.h.

    embedding: [bytes] uint8, read in place and kept alive, as are the cache and the rotary table; head: [vocabulary,
    hidden]; scaling: of attention scores; epsilon: of all norms; embedding_scale, logit_scale: factors of the embedding
    and of the logits; norm_after_rotary: the norms of q and k follow their rotation; score_cap,
    logit_cap, value_scale, softplus_gate: see csrc/model/decoder.h. All methods raise ValueError for shapes that
    disagree.
    """

    def __init__(
        self,
        *,
        hidden: int,
        scaling: float,
        epsilon: float,
        embedding_scale: float,
        norm_after_rotary: bool,
        score_cap: float,
        logit_cap: float,
        quant: str,
        embedding: Any,
        norm: Any,
        head: Linear,
        logit_scale: float,
        isa: str,
        value_scale: float = 1.0,
        softplus_gate: bool = False,
    ) -> None: ...
    def add_layer(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        attention_norm: Any,
        q: Linear | None,
        k: Linear | None,
        v: Linear | None,
        o: Linear,
        gate: Linear | None,
        linear_attention: LinearAttention | None,
        latent_attention: LatentAttention | None,
        q_norm: Any,
        k_norm: Any,
        v_norm: Any,
        clip: float,
        rotary_table: int,
        rotary_pairs: int,
        sliding_window: int,
        chunk: int,
        growth: float,
        period: float,
        sinks: Any,
        mlp_norm: Any,
        mlp: ExpertLayer | None,
        shared_gate: Linear | None,
        router: Linear | None,
        experts: ExpertLayer | None,
        experts_per_token: int,
        renormalise: bool,
        sigmoid: bool,
        scale: float,
        groups: int,
        groups_used: int,
        bias: Any,
        jitter: float,
        scales: Any,
        router_norm: Any,
        experts_norm: Any,
        shared_out_norm: Any,
        experts_out_norm: Any,
        attention_out_norm: Any,
        mlp_out_norm: Any,
        out_scale: float,
    ) -> None:
        """Append a layer. heads: of the query; kv_heads, head_dim: unused with linear attention; v None: a value is its
        key before norm and rotation; gate: of the output of attention; linear_attention, latent_attention: takes the
        place of q, k and v; q_norm, k_norm: empty, [head_dim] for each head, or of the whole projection; v_norm: empty
        or [head_dim]; clip 0: q, k and v are not clamped; rotary_pairs: pairs of columns of q and k that are rotated by
        the table rotary_table; sliding_window 0: no limit; chunk: a token at
        position p sees keys from p // chunk * chunk on, 0: all; growth, period: of queries, see csrc/model/growth.h;
        sinks: empty or [heads]; mlp: the dense MLP or the shared
        expert, as a layer of one expert; router, experts: of the routed experts; the rest: how the router chooses among
        them, with bias and scales that are empty or [experts]. Norms of parts are empty or [hidden]: of the input of
        router and experts, of the output of the shared expert and of the routed ones, and of what attention and MLP add
        to the residual. out_scale: factor of the residual after the layer."""

    def set_rotary(self, cosine: Any, sine: Any) -> None:
        """Set the rotary tables, [tables, positions, half] each."""

    def set_cache(self, keys: Sequence[Any], values: Sequence[Any], index_keys: Sequence[Any]) -> None:
        """Set the cache of the next steps, for each layer [pages, page_size, kv_heads, head_dim]. With latent attention
        the values are the keys. index_keys: with indexers, for each layer [pages, page_size, columns]; else empty."""

    def set_states(self, recent: Sequence[Any], states: Sequence[Any]) -> None:
        """Set the states of the next steps, for each layer with linear attention [slots, taps - 1, channels] and
        [slots, value_heads, key_dim, value_dim]."""

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        scored: Any,
        query_starts: Any,
        context_lengths: Any,
        page_table: Any,
        slot_mapping: Any,
        state_sources: Any,
        state_targets: Any,
        logits: Any,
        inputs: Any = None,
        outputs: Any = None,
    ) -> None:
        """Run one step. input_ids, position_ids: [1, tokens]; scored: [scored], rising, indices of the tokens whose
        logits [scored, vocabulary] are wanted; the index arrays are those of StepContext. inputs: [tokens, hidden], in
        place of embeddings. outputs: [scored, hidden], written before the last norm. A token with non-finite numbers
        spoils only its own sequence. Raises ValueError before anything is written."""

    def set_hidden(self, hidden: Any) -> None:
        """Write the input of the head of each token to [pages, page_size, hidden] float32 from now on, at its slot."""

    def expert_totals(self) -> tuple[int, int, int, float]:
        """Since the start: layers with routed experts run; different experts of each run, summed; bytes of their packed
        weights; seconds of wall time."""

    def expert_uses(self) -> list[list[int]]:
        """How often each routed expert of each layer was used since the start; no numbers for layers without. No step
        may run meanwhile."""

    def record_choices(self, choices: Any) -> None:
        """Write the experts of each step's tokens to choices [layers with routed experts, tokens, chosen] uint16 from
        now on, highest weight first; in the last layer those of the scored tokens. A longer step is refused. Raises
        ValueError if a layer chooses another number."""
