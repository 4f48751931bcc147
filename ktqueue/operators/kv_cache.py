"""The paged key/value cache: one pair of tensors per layer, written by slot mapping.

Knows nothing about the owner of a page.
"""

import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a cache, derived from the model's config. dtype: of the stored numbers.

    latent: None with grouped queries, whose keys and values have a tensor each, of `head_dim` columns. With multi-head
    latent attention there is one key head and no tensor of values: its values are the first `latent` columns of a key.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype
    latent: int | None = None

    @property
    def value_dim(self) -> int:
        """Columns of a value, and of the attention output of one query head."""
        return self.head_dim if self.latent is None else self.latent

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        tensors = 2 if self.latent is None else 1
        return tensors * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """The tensors of a cache. keys: per layer [pages, page_size, kv_heads, head_dim]; values: the same with value_dim
    columns; in a latent cache, views of the keys.

    With `scratch` the tensors have one more page, `scratch_page`, which no sequence owns. Rows that pad a captured
    graph write there.
    """

    def __init__(self, layout: KVLayout, pages: int, device: str = "cpu", *, scratch: bool = False) -> None:
        shape = (pages + scratch, layout.page_size, layout.kv_heads, layout.head_dim)
        self.layout = layout
        self.pages = pages
        self.scratch_page = pages if scratch else None
        self.keys = [_zeros(shape, layout.dtype, device) for _ in range(layout.layers)]
        if layout.latent is None:
            self.values = [_zeros(shape, layout.dtype, device) for _ in range(layout.layers)]
        else:
            self.values = [keys[..., : layout.latent] for keys in self.keys]

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None = None
    ) -> None:
        """Store `key` and `value` [tokens, kv_heads, head_dim] at `slot_mapping` [tokens] int64, in the cache's dtype.
        A latent cache has a key only.

        Values beyond float8's range are stored as the nearest number that it holds. Raises ValueError if the heads
        differ from the cache's.
        """
        for tensors, states in ((self.keys, key), (self.values, value)):
            if states is None:
                continue
            cache = tensors[layer].flatten(0, 1)
            if states.shape[1:] != cache.shape[1:]:
                raise ValueError(f"[kv_heads, head_dim] must be {[*cache.shape[1:]]}, got {[*states.shape[1:]]}")
            if cache.dtype.itemsize == 1:
                limit = torch.finfo(cache.dtype).max  # the cast would turn larger numbers into NaN
                states = states.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
                cache = cache.view(torch.uint8)  # which index_copy_ supports on every device
            cache.index_copy_(0, slot_mapping, states.to(cache.dtype))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer (copy-on-write of a shared, partly filled page)."""
        for tensors in (self.keys, self.values) if self.layout.latent is None else (self.keys,):
            for tensor in tensors:
                tensor[target].copy_(tensor[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return zeros. On the host the memory is allocated page by page when it is written, separately in each forked
    worker; torch.zeros would write all of it in the process that forks."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
