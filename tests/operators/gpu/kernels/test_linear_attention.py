"""Linear attention: the twin computes what the module of transformers does, the kernels what the twin does."""

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from ktqueue.operators.gpu.kernels.linear_attention import StateRows, linear_attention
from ktqueue.operators.linear_attention import LinearAttentionShape, read_linear_attention

from ..interpreted import by_kernel
from .comparing import DTYPES, assert_same, clones

SHAPE = LinearAttentionShape(key_heads=2, value_heads=4, key_dim=24, value_dim=40, taps=4)
EPSILON = 1e-6


def inputs(dtype: torch.dtype, lengths: tuple[int, ...], shape: LinearAttentionShape = SHAPE) -> dict[str, Any]:
    """Random arguments for rows with that many tokens. The second row begins with this step."""
    torch.manual_seed(1)
    tokens, rows, slots = sum(lengths), len(lengths), 2 * len(lengths)
    contexts = [length + (0 if row == 1 else 5) for row, length in enumerate(lengths)]
    width = shape.channels + shape.values + 2 * shape.value_heads
    return {
        "projected": torch.randn(tokens, width).to(dtype),
        "convolution": torch.randn(shape.taps, shape.channels),
        "decay_rates": -torch.rand(shape.value_heads),
        "decay_biases": torch.randn(shape.value_heads),
        "norm": torch.rand(shape.value_dim) + 0.5,
        "recent": torch.randn(slots, shape.taps - 1, shape.channels),
        "states": torch.randn(slots, shape.value_heads, shape.key_dim, shape.value_dim),
        "rows": StateRows(
            torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int32),
            torch.tensor([row if row % 2 else row + rows for row in range(rows)], dtype=torch.int32),
        ),
    }


def run(given: dict[str, Any], by: Any = lambda operation, *args, **named: operation(*args, **named)) -> list[Any]:
    own = clones({name: value for name, value in given.items() if isinstance(value, torch.Tensor)})
    projected = own.pop("projected")
    shape = given.get("shape", SHAPE)
    out = by(linear_attention, projected, shape, rows=given["rows"], epsilon=EPSILON, **own)
    return [out, own["recent"], own["states"]]


def test_the_twin_equals_the_module_of_transformers(given_weights: Any) -> None:
    make_config: Any = Qwen3NextConfig
    config = make_config(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    make_module: Any = Qwen3NextGatedDeltaNet
    module = make_module(config, 0).eval()
    with torch.no_grad():
        for parameter in (module.A_log, module.dt_bias, module.norm.weight):
            parameter.uniform_(0.5, 1.5)
        x = torch.randn(1, 70, 32)
        expected = module(x)[0]
        read = read_linear_attention(Below(given_weights(module, "F32")), "mixer", SHAPE)
        parts = [
            torch.from_numpy(part.data.view("f4").reshape(part.rows, -1).copy())
            for part in (read.qkv, read.gate, read.decay, read.rate)
        ]
        named = {
            name: torch.from_numpy(getattr(read, name))
            for name in ("convolution", "decay_rates", "decay_biases", "norm")
        }
        states = inputs(torch.float32, (1,))
        slot = torch.zeros(1, dtype=torch.int32)
        rows = StateRows(torch.tensor([0, 70]).int(), torch.tensor([70]).int(), slot, slot)
        found = linear_attention(
            x[0] @ torch.cat(parts).T,
            SHAPE,
            **named,
            epsilon=EPSILON,
            recent=states["recent"],
            states=states["states"],
            rows=rows,
        )
        assert (module.out_proj(found) - expected).abs().max() < 1e-5 * expected.abs().max()


class Below:
    """The weights of a module as if it were named `mixer`."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, method: str) -> Any:
        return lambda name: getattr(self._weights, method)(name.removeprefix("mixer."))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 7, 1, 3), (9, 2)])
def test_the_kernels_equal_their_twin(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    given = inputs(dtype, lengths)
    found, expected = run(given, by_kernel), run(given)
    assert_same(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert (one - other).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_chunks_of_a_sequence_change_no_number() -> None:
    given = inputs(torch.float32, (9,))
    slot = torch.zeros(1, dtype=torch.int32)

    def chunk(first: int, last: int, memory: list[torch.Tensor]) -> torch.Tensor:
        starts, contexts = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        part = {**given, "projected": given["projected"][first:last], "rows": StateRows(starts, contexts, slot, slot)}
        out, *memory[:] = run({**part, "recent": memory[0], "states": memory[1]}, by_kernel)
        assert isinstance(out, torch.Tensor)
        return out

    whole = chunk(0, 9, [given["recent"], given["states"]])
    memory = [given["recent"], given["states"]]
    parts = [chunk(first, last, memory) for first, last in ((0, 2), (2, 3), (3, 8), (8, 9))]
    assert torch.equal(torch.cat(parts), whole)


def test_shapes_that_do_not_fit_are_refused() -> None:
    given = inputs(torch.float32, (1,))
    with pytest.raises(ValueError, match="linear_attention does not take projected"):
        run({**given, "projected": given["projected"][:, :-1].contiguous()})


@pytest.mark.parametrize("by", ["twin", "kernels"])
def test_rows_that_continue_one_another_keep_every_state(by: str) -> None:
    """Each has the numbers of the same tokens in one row, and its state is that after its token. Rows that read what
    they write, as padding does, continue no other."""
    given = inputs(torch.float32, (1,) * 7)
    chain, sources, targets = [1, 2, 3], [4, 0, 0, 5, 6, 7, 7], [4, 0, 5, 6, 1, 7, 7]
    contexts = torch.tensor([4, 4, 5, 6, 7, 1, 1]).int()
    slots = [torch.tensor(numbers).int() for numbers in (sources, targets)]
    named = {"by": by_kernel} if by == "kernels" else {}
    found = run({**given, "rows": StateRows(torch.arange(8).int(), contexts, *slots)}, **named)
    assert targets[4] == 1 and not torch.equal(found[1][1], given["recent"][1])
    for count in range(1, 5):
        rows = StateRows(
            torch.tensor([0, count]).int(), torch.tensor([3 + count]).int(), *torch.tensor([[0], [2]]).int()
        )
        alone = run({**given, "projected": given["projected"][1 : 1 + count], "rows": rows})
        row = [*chain, 4][count - 1]
        assert_same(found[0][1 : 1 + count], alone[0])
        for memory, expected in zip(found[1:], alone[1:], strict=True):
            assert (memory[targets[row]] - expected[2]).abs().max() < 1e-5
    first = StateRows(torch.tensor([0, 1]).int(), torch.tensor([4]).int(), *torch.tensor([[4], [4]]).int())
    alone = run({**given, "projected": given["projected"][:1], "rows": first})
    assert_same(found[0][:1], alone[0])
    assert_same(found[2][4], alone[2][4])
