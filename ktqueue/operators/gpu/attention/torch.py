"""The torch twin of the attention planners: over host arrays, on any device, without CUDA graphs.

It is reference.paged_attention, but float32 on the CPU takes the compiled kernel, as in operators/attention.py.
"""

import torch

from ktqueue.operators import attention, reference
from ktqueue.operators.gpu.attention.page_lists import check_decode_step, check_prompt_step, prompt_step_fits
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import ScoreOptions, StepContext


class TorchPlan:
    """Attends for one step. `host`: that step; None: a decode plan before its first update."""

    def __init__(self, host: StepContext | None) -> None:
        self._host = host

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. query [tokens, heads, head_dim]. Raises ValueError before the first update."""
        if self._host is None:
            raise ValueError("a decode plan needs an update before it attends")
        query, keys, values = query.transpose(0, 1), kv.keys[layer], kv.values[layer]
        if attention.has_kernel(query, keys):  # it writes the step's keys and values again
            slots = self._host.slot_mapping
            key, value = (cache.flatten(0, 1)[slots].transpose(0, 1) for cache in (keys, values))
            latent = kv.layout.latent is not None
            return attention.by_kernel(query, key, None if latent else value, keys, values, self._host, options)
        return reference.paged_attention(
            query,
            keys,
            values,
            self._host.query_starts,
            self._host.context_lengths,
            self._host.page_table,
            scaling=options.scaling,
            sliding_window=options.sliding_window or None,
            sinks=options.sinks,
            cap=options.cap,
            chunk=options.chunk,
            scale=kv.layout.scale(layer),
        )


class TorchDecodePlan(TorchPlan):
    """A decode plan of `rows` rows with at most `max_pages` pages each."""

    def __init__(self, rows: int, max_pages: int, page_size: int) -> None:
        super().__init__(None)
        self._limits = rows, max_pages, page_size

    def update(self, host: StepContext) -> None:
        """See DecodePlan."""
        check_decode_step(host, *self._limits)
        self._host = _copied(host)


class TorchPromptPlan(TorchPlan):
    """A plan of steps with at most `rows` rows, `tokens` tokens in all and `max_pages` pages each."""

    def __init__(self, rows: int, tokens: int, max_pages: int, page_size: int) -> None:
        super().__init__(None)
        self._limits = rows, tokens, max_pages, page_size

    def holds(self, host: StepContext) -> bool:
        """See PromptPlan."""
        return prompt_step_fits(host, *self._limits)

    def update(self, host: StepContext) -> None:
        """See PromptPlan."""
        check_prompt_step(host, *self._limits)
        self._host = _copied(host)

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan and PromptPlan."""
        out = query.new_zeros(*query.shape[:2], kv.values[layer].shape[-1])
        if self._host is not None:
            live = len(self._host.slot_mapping)
            out[:live] = super().attend(layer, query[:live], kv, options)
        return out


def _copied(host: StepContext) -> StepContext:
    """The step in memory of its own: the caller may overwrite its arrays."""
    return StepContext(
        query_starts=host.query_starts.clone(),
        context_lengths=host.context_lengths.clone(),
        page_table=host.page_table.clone(),
        slot_mapping=host.slot_mapping.clone(),
        kv=host.kv,
    )


class TorchPlanner:
    """An AttentionPlanner without buffers."""

    backend = "torch"
    workspace_bytes = 0

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def plan(self, host: StepContext) -> TorchPlan:
        """See AttentionPlanner."""
        return TorchPlan(host)

    def another(self) -> "TorchPlanner":
        """See AttentionPlanner."""
        return TorchPlanner(self._page_size)

    def decode_plan(self, rows: int, max_pages: int) -> TorchDecodePlan:
        """See AttentionPlanner."""
        return TorchDecodePlan(rows, max_pages, self._page_size)

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> TorchPromptPlan:
        """See AttentionPlanner."""
        return TorchPromptPlan(rows, tokens, max_pages, self._page_size)
