"""The paged key/value cache: one pair of tensors a layer, written by slot mapping.

Knows nothing of who owns a page.
"""

import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a cache, derived from the model's config. `dtype` is the cache's own.

    `latent`: None with grouped queries, where keys and values have a tensor each, of `head_dim` columns; with
    multi-head latent attention that many columns, the first, of the one key head are its values too, and values have no
    tensor of their own.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype
    latent: int | None = None

    @property
    def value_dim(self) -> int:
        """Columns of a value, and so of what attention gives for a query head."""
        return self.head_dim if self.latent is None else self.latent

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        tensors = 2 if self.latent is None else 1
        return tensors * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """`keys`: per layer [pages, page_size, kv_heads, head_dim]; `values`: the same with value_dim columns, of a latent
    cache views of the keys.

    With `scratch` the tensors have one page more, `scratch_page`, that no sequence ever owns: rows that pad a captured
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
        """Store `key` and `value` [tokens, kv_heads, head_dim] at `slot_mapping` [tokens] int64, in the cache's type;
        of a latent cache there is a key only.

        What float8 cannot hold is stored as the nearest number that it can. Raises ValueError for other heads than the
        cache's.
        """
        for tensors, states in ((self.keys, key), (self.values, value)):
            if states is None:
                continue
            cache = tensors[layer].flatten(0, 1)
            if states.shape[1:] != cache.shape[1:]:
                raise ValueError(f"[kv_heads, head_dim] must be {[*cache.shape[1:]]}, got {[*states.shape[1:]]}")
            if cache.dtype.itemsize == 1:
                limit = torch.finfo(cache.dtype).max  # the cast makes NaN of more
                states = states.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
                cache = cache.view(torch.uint8)  # which index_copy_ knows on every device
            cache.index_copy_(0, slot_mapping, states.to(cache.dtype))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer (copy-on-write of a shared, partly filled page)."""
        for tensors in (self.keys, self.values) if self.layout.latent is None else (self.keys,):
            for tensor in tensors:
                tensor[target].copy_(tensor[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """On the host memory that is taken page by page as it is written to, by each forked worker for itself: torch.zeros
    would write to all of it, in the process that forks them, too."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
