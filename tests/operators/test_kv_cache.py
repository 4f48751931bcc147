"""The paged cache."""

import resource
from pathlib import Path

import pytest
import torch

from ktqueue.operators.kv_cache import CacheScale, KVCache, KVHeads, KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=8, page_size=4, dtype=torch.float32)


def test_page_bytes_are_those_of_the_tensors() -> None:
    kv = KVCache(LAYOUT, 5)
    tensors = [*kv.keys, *kv.values]
    assert LAYOUT.page_bytes * 5 == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_tokens_are_written_at_their_slots() -> None:
    kv = KVCache(LAYOUT, 5)
    key, value = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    kv.write(1, torch.tensor([19, 4, 6]), key, value)
    assert torch.equal(kv.keys[1][4, 3], key[0])
    assert torch.equal(kv.values[1][1, 0], value[1])
    assert torch.equal(kv.values[1][1, 2], value[2])
    assert not kv.keys[0].any()
    assert kv.keys[1].ne(0).sum() == key.numel()


def test_other_heads_are_refused_even_if_their_size_would_fit() -> None:
    states = torch.zeros(1, 2, 12)
    with pytest.raises(ValueError, match=r"\[kv_heads, head_dim\] must be \[3, 8\], got \[2, 12\]"):
        KVCache(LAYOUT, 5).write(0, torch.tensor([3]), states, states)


def test_copy_page_copies_every_layer_and_leaves_the_rest() -> None:
    kv = KVCache(LAYOUT, 3)
    tensors = (*kv.keys, *kv.values)
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    kv.copy_page(2, 0)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[0], old[2])
        assert torch.equal(tensor[1:], old[1:])


@pytest.mark.parametrize("latent", [None, 2])
def test_float8_tells_how_much_of_it_saturates(latent: int | None) -> None:
    layout = KVLayout(layers=2, kv_heads=1, head_dim=4, page_size=2, dtype=torch.float8_e4m3fn, latent=latent, index=2)
    kv = KVCache(layout, 2)
    value = None if latent else torch.zeros(1, 1, 4)
    kv.write(0, torch.tensor([3]), torch.tensor([[[400.0, -1, 0, 2]]]), value)
    assert kv.saturated_share() == 0
    kv.write(1, torch.tensor([3]), torch.tensor([[[9000.0, -460, 0, 2]]]), value)
    assert kv.saturated_share() == 2 / 16
    kv.write_index_keys(0, torch.tensor([0, 1]), torch.full((2, 2), 500.0))
    assert kv.saturated_share() == 4 / 8
    assert KVCache(LAYOUT, 1).saturated_share() == 0


def test_float8_stores_the_nearest_number() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, page_size=2, dtype=torch.float8_e4m3fn)
    kv = KVCache(layout, 2)
    kv.write(0, torch.tensor([3]), torch.tensor([[[1e4, -1e4]]], dtype=torch.bfloat16), torch.tensor([[[1.06, 0.0]]]))
    assert kv.keys[0][1, 1, 0].float().tolist() == [448.0, -448.0]
    assert kv.values[0][1, 1, 0].float().tolist() == [1.0, 0.0]
    kv.copy_page(1, 0)
    assert kv.keys[0][0, 1, 0].float().tolist() == [448.0, -448.0]


def test_float8_is_stored_in_units_of_its_scale() -> None:
    scales = CacheScale(), CacheScale(4, 0.25)
    layout = KVLayout(layers=2, kv_heads=1, head_dim=2, page_size=2, dtype=torch.float8_e4m3fn, scales=scales)
    kv = KVCache(layout, 2)
    key, value = torch.tensor([[[1000.0, -3.0]]]), torch.tensor([[[0.03125, 0.0009]]])
    for layer in range(2):
        kv.write(layer, torch.tensor([3]), key, value)
    assert kv.keys[0][1, 1, 0].float().tolist() == [448, -3] and kv.keys[1][1, 1, 0].float().tolist() == [256, -0.75]
    assert kv.values[0][1, 1, 0].float().tolist() == [0.03125, 0]
    assert kv.values[1][1, 1, 0].float().tolist() == [0.125, 0.00390625]


def test_a_scratch_page_is_not_counted() -> None:
    kv = KVCache(LAYOUT, 3, scratch=True)
    assert kv.pages == kv.scratch_page == 3 and len(kv.keys[0]) == 4
    assert KVCache(LAYOUT, 3).scratch_page is None


def test_the_values_of_a_latent_cache_are_the_first_columns_of_its_keys() -> None:
    layout = KVLayout(layers=2, kv_heads=1, head_dim=12, page_size=4, dtype=torch.float32, latent=8)
    kv = KVCache(layout, 5)
    assert layout.page_bytes * 5 == sum(keys.numel() * keys.element_size() for keys in kv.keys)
    key = torch.randn(3, 1, 12)
    kv.write(1, torch.tensor([19, 4, 6]), key)
    assert torch.equal(kv.keys[1][4, 3], key[0])
    assert torch.equal(kv.values[1][1, 2], key[2, :, :8])
    assert not kv.keys[0].any()
    kv.copy_page(1, 3)
    assert torch.equal(kv.keys[1][3, [0, 2]], key[1:])
    assert torch.equal(kv.values[1][3, 2], key[2, :, :8])


def test_layers_may_have_different_heads() -> None:
    by_layer = KVHeads(2, 8), KVHeads(1, 24), KVHeads(2, 8)
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, page_size=4, dtype=torch.float32, by_layer=by_layer)
    kv = KVCache(layout, 5)
    assert [(*keys.shape[2:],) for keys in kv.keys] == [*by_layer]
    assert layout.page_bytes * 5 == sum(tensor.nbytes for tensor in (*kv.keys, *kv.values))
    assert layout.alike(by_layer[0]).heads == (by_layer[0],) * 2


def test_host_memory_is_allocated_when_it_is_written() -> None:
    """Otherwise each worker of a fork server would copy all of it."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    layout = KVLayout(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
    before = resident()
    kv = KVCache(layout, (512 << 20) // layout.page_bytes)
    assert resident() - before < 64 << 20
    slots = torch.arange(64)
    kv.write(0, slots, *(torch.ones(64, 2, 64) for _ in range(2)))
    assert kv.keys[0][:4].eq(1).all() and kv.values[0][4:8].eq(0).all()
