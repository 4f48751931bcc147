"""The paged key/value cache: one pair of tensors per layer, written by slot mapping. Layers with linear attention have
states in slots instead.

Knows nothing about the owner of a page or of a slot.
"""

import math
import mmap
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ktqueue.operators.linear_attention import LinearAttentionShape


class KVHeads(NamedTuple):
    """The heads of a layer's keys and values: their number, and the columns of each."""

    kv_heads: int
    head_dim: int


class CacheScale(NamedTuple):
    """What stored keys and values of a layer are multiplied by when they are read: powers of two."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = CacheScale()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a cache, derived from the model's config. dtype: of the stored numbers. layers: those with keys and
    values. linear: the shapes of those with linear attention, whose states are float32.

    by_layer: the heads of each layer with keys and values, if layers differ; then kv_heads and head_dim are those of
    the first one. Empty: all layers have kv_heads and head_dim.

    latent: None with grouped queries, whose keys and values have a tensor each, of `head_dim` columns. With multi-head
    latent attention there is one key head and no tensor of values: its values are the first `latent` columns of a key.
    index: columns of the key that an indexer has beside them; 0: there is none.

    scales: of each layer with keys and values, in a float8 cache; empty: all are 1. Those of a latent layer are equal.
    Keys of an indexer have none.

    original_length: keys of sequences with more tokens than that are rotated by other angles; 0: all keys by the same.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype
    latent: int | None = None
    index: int = 0
    linear: tuple[LinearAttentionShape, ...] = ()
    original_length: int = 0
    by_layer: tuple[KVHeads, ...] = ()
    scales: tuple[CacheScale, ...] = ()

    def scale(self, layer: int) -> CacheScale:
        """The scales of a layer with keys and values."""
        return self.scales[layer] if self.scales else UNSCALED

    @property
    def heads(self) -> tuple[KVHeads, ...]:
        """The heads of each layer with keys and values."""
        return self.by_layer or (KVHeads(self.kv_heads, self.head_dim),) * self.layers

    def alike(self, heads: KVHeads) -> "KVLayout":
        """Return the layout of a model that has only the layers with these heads."""
        count = self.heads.count(heads)
        return replace(self, layers=count, kv_heads=heads.kv_heads, head_dim=heads.head_dim, by_layer=(), scales=())

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all layers with linear attention."""
        return 4 * sum(shape.state_numbers for shape in self.linear)

    @property
    def value_dim(self) -> int:
        """Columns of a value, and of the attention output of one query head."""
        return self.head_dim if self.latent is None else self.latent

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        tensors = 2 if self.latent is None else 1
        numbers = sum(tensors * heads.kv_heads * heads.head_dim + self.index for heads in self.heads)
        return self.page_size * numbers * self.dtype.itemsize


class KVCache:
    """The tensors of a cache. keys: per layer [pages, page_size, kv_heads, head_dim]; values: the same with value_dim
    columns; in a latent cache, views of the keys.

    index_keys: per layer [pages, page_size, index]; empty without an indexer.

    recent: per layer with linear attention the last inputs of its convolution, [slots, taps - 1, channels] float32;
    states: [slots, value_heads, key_dim, value_dim] float32.

    With `scratch` the tensors have one more page and one more slot, `scratch_page` and `scratch_slot`, which no
    sequence owns. Rows that pad a captured graph write there.
    """

    def __init__(
        self, layout: KVLayout, pages: int, device: str = "cpu", *, slots: int = 0, scratch: bool = False
    ) -> None:
        page_shape = (pages + scratch, layout.page_size)
        shapes = [(*page_shape, heads.kv_heads, heads.head_dim) for heads in layout.heads]
        self.layout = layout
        self.pages = pages
        self.slots = slots
        self.scratch_page = pages if scratch else None
        self.scratch_slot = slots if scratch else None
        self.keys = [_zeros(shape, layout.dtype, device) for shape in shapes]
        if layout.latent is None:
            self.values = [_zeros(shape, layout.dtype, device) for shape in shapes]
        else:
            self.values = [keys[..., : layout.latent] for keys in self.keys]
        index_layers = layout.layers if layout.index else 0
        self.index_keys = [_zeros((*page_shape, layout.index), layout.dtype, device) for _ in range(index_layers)]
        slots += scratch
        self.recent = [
            _zeros((slots, linear.taps - 1, linear.channels), torch.float32, device) for linear in layout.linear
        ]
        self.states = [
            _zeros((slots, linear.value_heads, linear.key_dim, linear.value_dim), torch.float32, device)
            for linear in layout.linear
        ]

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None = None
    ) -> None:
        """Store `key` and `value` [tokens, kv_heads, head_dim] at `slot_mapping` [tokens] int64, in the cache's dtype
        and divided by the layer's scales. A latent cache has a key only.

        Values beyond float8's range are stored as the nearest number that it holds. Raises ValueError if the heads
        differ from the cache's.
        """
        scale = self.layout.scale(layer)
        for tensors, states, divisor in ((self.keys, key, scale.key), (self.values, value, scale.value)):
            if states is None:
                continue
            cache = tensors[layer].flatten(0, 1)
            if states.shape[1:] != cache.shape[1:]:
                raise ValueError(f"[kv_heads, head_dim] must be {[*cache.shape[1:]]}, got {[*states.shape[1:]]}")
            store(cache, slot_mapping, states, divisor)

    def saturated_share(self) -> float:
        """The share of keys and values, those of the worst layer and tensor, that are as large as float8 allows.

        They were about that or larger before they were written. 0 for other types. Waits for the device.
        """
        if self.layout.dtype.itemsize > 1:
            return 0.0
        limit = torch.tensor(torch.finfo(self.layout.dtype).max).to(self.layout.dtype).view(torch.uint8).item()
        tensors = [*self.keys, *(self.values if self.layout.latent is None else ()), *self.index_keys]
        counts = [(states.view(torch.uint8) & 0x7F == limit).count_nonzero() / states.numel() for states in tensors]
        return float(torch.stack(counts).max())

    def write_index_keys(self, layer: int, slot_mapping: torch.Tensor, keys: torch.Tensor) -> None:
        """Store the indexer's keys [tokens, index] at `slot_mapping`, like `write` but without a scale."""
        store(self.index_keys[layer].flatten(0, 1), slot_mapping, keys)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer (copy-on-write of a shared, partly filled page)."""
        for tensors in (self.keys, self.values) if self.layout.latent is None else (self.keys, self.index_keys):
            for tensor in tensors:
                tensor[target].copy_(tensor[source])


def store(cache: torch.Tensor, slot_mapping: torch.Tensor, states: torch.Tensor, scale: float = 1.0) -> None:
    """Write states [tokens, ...] to cache [slots, ...] at `slot_mapping` [tokens] int64, in its dtype; numbers of
    float8 are divided by `scale`, and those beyond its range saturate."""
    if cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max  # the cast would turn larger numbers into NaN
        states = (states.float() / scale).clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)  # which index_copy_ supports on every device
    cache.index_copy_(0, slot_mapping, states.to(cache.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return zeros. On the host the memory is allocated page by page when it is written, separately in each forked
    worker; torch.zeros would write all of it in the process that forks."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
