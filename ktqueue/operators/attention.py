"""Paged attention with the signature that transformers calls (AttentionInterface).

A step with an attention plan (on a GPU) uses that plan. Otherwise float32 on the CPU uses the compiled kernel, and
everything else the torch twin. The step is passed as the keyword `step`.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from ktqueue.operators import native, reference
from ktqueue.operators.step import ScoreOptions, StepContext

NAME = "ktqueue_paged"
"""The name of this attention in transformers (`attn_implementation`)."""
_CAPPED = ("Gemma2Attention", "VaultGemmaAttention")
"""Classes that limit their scores softly. Gemma 3 has the key in its config, but does not."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: StepContext | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values into layer `module.layer_idx` of the cache, then attend causally.

    query [1, heads, tokens, head_dim], key [1, kv_heads, tokens, head_dim], value [1, kv_heads, tokens, value_dim] ->
    ([1, tokens, heads, value_dim], None); values may have fewer columns than keys. The mask follows from the step;
    `attention_mask` must be None. s_aux: [heads], the sinks of `attend`; softcap: its cap. Raises ValueError for a
    mask, and if there is no step or it does not fit the cache.
    """
    if step is None:
        raise ValueError(f"{type(module).__name__} did not receive the step: the model does not pass it on")
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} has a mask of its own, but the mask of our attention follows from the step"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = window_of(module, getattr(module, "config", None), sliding_window)
    options = ScoreOptions(scaling, window, None if s_aux is None else s_aux.float(), softcap or 0.0)
    width = value.shape[-1]
    if width < key.shape[-1]:  # the cache has one size for both
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    return attend(layer, query[0], key[0], value[0], step, options)[None, ..., :width], None


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    step: StepContext,
    options: ScoreOptions,
) -> torch.Tensor:
    """Write the step's keys and values into `layer` of the cache, then attend causally.

    query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim] -> [tokens, heads, value_dim]. `value`
    is None if the cache holds latents. Raises ValueError for a step that does not fit the cache.
    """
    keys, values = step.kv.keys[layer], step.kv.values[layer]
    if step.attention is not None:
        _write(layer, key, value, step)
        return step.attention.attend(layer, query.transpose(0, 1), step.kv, options)
    if has_kernel(query, keys):
        return by_kernel(query, key, value, keys, values, step, options)
    _write(layer, key, value, step)
    return reference.paged_attention(
        query,
        keys,
        values,
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=options.scaling,
        sliding_window=options.sliding_window or None,
        sinks=options.sinks,
        cap=options.cap,
        chunk=options.chunk,
        scale=step.kv.layout.scale(layer),
    )


def has_kernel(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the compiled kernel computes such a query [heads, tokens, head_dim] with a cache like `keys`."""
    return query.dtype == keys.dtype == torch.float32 and query.device.type == "cpu" and query.shape[-1] % 8 == 0


def by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepContext,
    options: ScoreOptions,
) -> torch.Tensor:
    """`attend` by the compiled kernel, with the tensors `keys` and `values` of a layer's cache; see has_kernel."""
    heads, tokens, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim)
    # The kernel needs values as wide as keys. From a latent cache it sums whole keys, and the extra columns are
    # dropped.
    native.paged_attention(
        _dense(query),
        _dense(key),
        _dense(key if value is None else value),
        keys.numpy(),
        (keys if value is None else values).numpy(),
        step.query_starts.numpy(),
        step.context_lengths.numpy(),
        step.page_table.contiguous().numpy(),
        step.slot_mapping.contiguous().numpy(),
        out.numpy(),
        scaling=options.scaling,
        score_cap=options.cap,
        sliding_window=options.sliding_window,
        chunk=options.chunk,
        sinks=None if options.sinks is None else native.as_array(options.sinks),
    )
    return out[..., : values.shape[-1]]


def _write(layer: int, key: torch.Tensor, value: torch.Tensor | None, step: StepContext) -> None:
    step.kv.write(layer, step.slot_mapping, key.transpose(0, 1), None if value is None else value.transpose(0, 1))


def _dense(states: torch.Tensor) -> native.Floats:
    """Return [heads, tokens, head_dim] as numpy with a dense last dimension."""
    array: native.Floats = native.as_array(states)
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def window_of(module: nn.Module, config: Any, passed: int | None = None) -> int:
    """Return the number of keys that a token sees at most, including itself; 0: all.

    If `config` lists layer types, sliding layers have its window, as in the masks that transformers makes, whatever the
    module says. Otherwise it is the window that the module passes or holds, or else the config's.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return 0
    stated = getattr(config, "sliding_window", None)
    if not kinds:  # Qwen2-MoE has a window in its config but does not pass it
        stated = passed or getattr(module, "sliding_window", stated)
    return stated or 0


def chunk_of(module: nn.Module, config: Any) -> int:
    """Return the chunk of ScoreOptions for a layer that `config` calls chunked; 0 for any other."""
    kinds = getattr(config, "layer_types", None)
    return int(config.attention_chunk_size) if kinds and kinds[module.layer_idx] == "chunked_attention" else 0


def cap_of(module: nn.Module) -> float:
    """Return the soft limit of the attention scores of a module of transformers: see ScoreOptions."""
    return float(module.attn_logit_softcapping or 0.0) if type(module).__name__ in _CAPPED else 0.0  # type: ignore[arg-type]
