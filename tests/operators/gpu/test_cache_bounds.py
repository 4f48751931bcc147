"""Bounds of keys and values by weights alone, and the scales of a float8 cache, on CPU tensors and on a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, feed, make_model, make_planner_for, token_error
from few_families import EVERY, FEW, on_each_device

from ktqueue.operators.gpu.cache_bounds import CacheBound, cache_scales
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.kv_cache import CacheScale

FLOAT8 = torch.float8_e4m3fn


def filled(decoder: GpuDecoder, sequences: dict[str, list[int]], **others: Any) -> Cache:
    """A cache with the keys and values of these sequences."""
    cache = Cache(decoder, device=decoder.device, planner=make_planner_for, **others)
    with torch.inference_mode():
        cache.step(sequences)
    return cache


@pytest.mark.parametrize("family", EVERY)
def test_no_key_and_no_value_is_above_its_bound(family: str, make_decoder: Callable[..., GpuDecoder]) -> None:
    """A bound far above what is found would cost the small numbers of float8 their precision."""
    decoder = make_decoder(make_model(family))
    kv = filled(decoder, SEQUENCES).kv
    for bound, keys, values in zip(decoder.cache_bounds(), kv.keys, kv.values, strict=True):
        for states, limit in ((keys, bound.key), (values, bound.value)):
            assert limit / 20 < states.abs().max() < 1.0001 * limit


@pytest.mark.parametrize("family", ["qwen2_moe", "llama", "qwen3", "mistral"])
def test_a_bound_of_values_is_reached(family: str, make_decoder: Callable[..., GpuDecoder]) -> None:
    """The worst embedding is the row of the first layer's matrix with the largest bound."""
    model = make_model(family)
    layer = model.model.layers[0]
    rows, bias = layer.self_attn.v_proj.weight * layer.input_layernorm.weight, layer.self_attn.v_proj.bias
    always = torch.zeros(len(rows)) if bias is None else bias
    worst = int((rows.norm(dim=1) * rows.shape[1] ** 0.5 + always.abs()).argmax())
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = rows[worst] * (1000 if always[worst] >= 0 else -1000)
    decoder = make_decoder(model)
    found = filled(decoder, {"s": [3]}).kv.values[0].abs().max()
    assert float(found) == pytest.approx(decoder.cache_bounds()[0].value, rel=1e-4)


def test_biases_of_a_norm_are_part_of_the_bound(make_decoder: Callable[..., GpuDecoder]) -> None:
    model = make_model("phimoe")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.bias.add_(100)
    decoder = make_decoder(model)
    kv, bound = filled(decoder, SEQUENCES).kv, decoder.cache_bounds()[0]
    assert bound.key / 4 < kv.keys[0].abs().max() < bound.key
    assert bound.value / 2 < kv.values[0].abs().max() < bound.value


def test_keys_that_yarn_makes_longer_have_larger_bounds(make_decoder: Callable[..., GpuDecoder]) -> None:
    model = make_model("qwen3_moe with yarn")
    norm = model.model.layers[0].self_attn.k_norm.weight
    length = 1 + 0.1 * math.log(4)  # transformers' factor of cosines and sines for sequences of four times the length
    expected = float(norm.detach().abs().max()) * len(norm) ** 0.5 * length
    assert make_decoder(model).cache_bounds()[0].key == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("family", "device"), on_each_device(FEW, EVERY))
def test_scales_are_undone_when_keys_and_values_are_read(family: str, make_decoder: Callable[..., GpuDecoder]) -> None:
    """Powers of two change no rounding, as long as numbers neither saturate nor are tiny."""
    decoder = make_decoder(make_model(family))
    options: Any = {"device": decoder.device, "planner": make_planner_for, "dtype": FLOAT8}
    layers = range(len(decoder.cache_bounds()))
    different = [CacheScale(2.0**-4, 2.0 ** -(4 if decoder.facts.latent else 5)) for _ in layers]
    different[0] = CacheScale(2.0**-5, 2.0**-5)
    with torch.inference_mode():
        found, expected = (
            feed(decoder, scales=tuple(scales), **options)
            for scales in (different, [CacheScale(0.125, 0.125) for _ in layers])
        )
    assert token_error(found, expected) < 1e-3


def test_scales_are_the_powers_of_two_nearest_to_1_that_hold_the_bounds() -> None:
    bounds = {448.0: 1.0, 449.0: 2.0, 7.1: 1.0, 7.0: 0.5, 3000.0: 8.0, 1e-3: 2.0**-13, 0.0: 1.0, float("inf"): 1.0}
    for bound, scale in bounds.items():
        found = cache_scales([CacheBound("a", bound, 900.0)], {}, latent=False)
        assert found == (CacheScale(scale, 4.0),)
    assert cache_scales([CacheBound("a", 448, 10), CacheBound("b", 20, 30)], {}, latent=False) == ()


def test_a_checkpoint_may_state_scales() -> None:
    bounds = [CacheBound("a", 1.0, 1.0), CacheBound("b", 20.0, 30.0), CacheBound("c", 20.0, 20.0)]
    stated = {"b": CacheScale(0.02, 3.0), "c": CacheScale(1.0, 0.25)}
    first = CacheScale(0.125, 0.125)
    assert cache_scales(bounds, stated, latent=False) == (first, CacheScale(2.0**-5, 4.0), CacheScale(1.0, 0.25))
    assert cache_scales(bounds, stated, latent=True)[1:] == (CacheScale(2.0**-5, 2.0**-5), CacheScale(1.0, 1.0))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_large_keys_and_values_do_not_saturate(family: str, make_decoder: Callable[..., GpuDecoder]) -> None:
    model = make_model(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(3000)
    decoder = make_decoder(model)
    scales = cache_scales(decoder.cache_bounds(), {}, latent=decoder.facts.latent is not None)
    assert filled(decoder, SEQUENCES, dtype=FLOAT8).kv.saturated_share() > 0
    assert scales and filled(decoder, SEQUENCES, dtype=FLOAT8, scales=scales).kv.saturated_share() == 0


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_small_keys_and_values_keep_their_precision(family: str, make_decoder: Callable[..., GpuDecoder]) -> None:
    """Without scales, most of them would become 0."""
    model = make_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("input_layernorm.weight", "kv_a_layernorm.weight", "v_proj.bias")):
                parameter.mul_(2.0**-11)
            elif name.endswith("o_proj.weight"):
                parameter.mul_(2.0**11)
    decoder = make_decoder(model)
    scales = cache_scales(decoder.cache_bounds(), {}, latent=decoder.facts.latent is not None)
    options: Any = {"device": decoder.device, "planner": make_planner_for}
    with torch.inference_mode():
        exact = feed(decoder, **options)
        plain, scaled = (feed(decoder, dtype=FLOAT8, scales=each, **options) for each in ((), scales))
    assert token_error(scaled, exact) < 0.05 < 0.2 < token_error(plain, exact)
