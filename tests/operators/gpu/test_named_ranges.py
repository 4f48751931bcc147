"""Ranges around layers: their names and their nesting."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decoder_families import feed, make_model, make_planner_for

from ktqueue.operators.named_ranges import name_layers


class Ranges:
    """Ranges that write down their names, each with the number of ranges around it. All must be closed."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.depth = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.names.append((self.depth, name))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def fed(decoder: Any) -> torch.Tensor:
    """The logits of some sequences, [tokens, vocab]."""
    with torch.inference_mode():
        return torch.cat(list(feed(decoder, device=decoder.device, planner=make_planner_for).values()))


def test_the_layers_of_a_decoder_have_names(make_decoder: Callable[..., Any]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    expected = fed(make_decoder(model))
    named, ranges = make_decoder(model), Ranges()
    name_layers(named, ranges)
    assert torch.equal(fed(named), expected)
    layers = [(0, f"layer {layer} {part}") for layer in (0, 1) for part in ("query", "attention", "mlp")]
    assert ranges.names[: len(layers)] == layers
    assert set(ranges.names) == set(layers)


def test_the_layers_of_a_module_of_transformers_have_the_names_of_its_parts() -> None:
    model, ranges = make_model("qwen3_moe", num_hidden_layers=2), Ranges()
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(tokens).logits
        name_layers(model, ranges)
        assert torch.equal(model(tokens).logits, expected)
    assert [name for depth, name in ranges.names if depth == 0] == ["model.layers.0", "model.layers.1"]
    assert (1, "model.layers.1.self_attn") in ranges.names
    assert (1, "model.layers.1.mlp") in ranges.names
