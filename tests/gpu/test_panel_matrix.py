"""On a GPU, the kernels of a matrix in packed panels equal their twins, also in a graph."""

from collections.abc import Callable

import pytest
import torch

from ktqueue.operators.gpu.dense import FEW_ROWS, DecodeBuffer, QuantisedLinear
from ktqueue.operators.gpu.kernels import panel_clusters
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.panel_matrix import multiply_few
from ktqueue.operators.gpu.kernels.panel_tensor_cores import MOST_TOKENS, multiply_some
from ktqueue.operators.packed import Bytes

from ..operators.gpu.kernels.matrices import BLOCKS, activations, columns_of, make_panels

UNROUNDED = "Q4_0", "Q6_K"
"""Formats of which no weight is rounded where their scales multiply sums: see superblock.cuh."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def assert_close(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (got.cpu().double() - expected.double()).norm() <= bound * expected.double().norm()


@pytest.mark.parametrize("quant", BLOCKS)
def test_decoded_rows(quant: str, random_weights: Callable[..., Bytes]) -> None:
    for columns, dtype in ((columns_of(quant), torch.float32), (2048, torch.bfloat16)):
        panels, weights = make_panels(random_weights, quant, 75, columns, "cuda")
        ids = torch.randint(75, (100,))
        out = torch.full((60, columns), torch.nan, dtype=dtype, device="cuda")
        panels.decode(out, first=11)
        assert torch.equal(out.cpu(), weights[11:71].to(dtype))
        out = torch.full((100, columns), torch.nan, dtype=dtype, device="cuda")
        panels.decode(out, ids=ids.cuda())
        assert torch.equal(out.cpu(), weights[ids].to(dtype))


@pytest.mark.parametrize("quant", BLOCKS)
def test_few_rows(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """One part or two, rows that do not fill a panel, more columns than a tile has."""
    for columns, tokens, dtype in (
        (columns_of(quant), 1, torch.float16),
        (4096, 1, torch.bfloat16),
        (4096, FEW_ROWS, torch.bfloat16),
    ):
        made = [make_panels(random_weights, one, rows, columns, "cuda") for one, rows in ((quant, 261), ("Q8_0", 40))]
        x = activations(tokens, columns, dtype)
        for parts in (made[:1], made):
            weights = torch.cat([one for _, one in parts])
            bias = activations(1, len(weights), dtype)[0] if len(parts) > 1 else None
            out = torch.full((tokens, len(weights)), torch.nan, device="cuda")
            multiply_few([one for one, _ in parts], x.cuda(), None if bias is None else bias.cuda(), out)
            expected = x.double() @ weights.double().T
            assert_close(out, expected if bias is None else expected + bias.double(), 1e-5)


@pytest.mark.parametrize("quant", BLOCKS)
def test_some_rows(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """By tensor cores: one part, two or three, rows that do not fill a panel, all numbers of eight tokens."""
    many = 1792 + columns_of(quant)
    for columns, tokens in ((columns_of(quant), 3), (2048, 16), (many, 9), (4096, MOST_TOKENS), (4096, 8)):
        parts = ((quant, 261), ("Q8_0", 40), (quant, 2600))
        made = [make_panels(random_weights, one, rows, columns, "cuda") for one, rows in parts]
        x = activations(tokens, columns + 32, torch.bfloat16)[:, 32:]
        for some in (made[:1], made[:2], made):
            weights = torch.cat([one for _, one in some])
            if quant not in UNROUNDED:
                weights = weights.bfloat16()
            bias = activations(1, len(weights), torch.bfloat16)[0] if len(some) > 1 else None
            out = torch.full((tokens, len(weights) + 1), torch.nan, device="cuda")
            panels = [one for one, _ in some]
            multiply_some(panels, x.cuda(), None if bias is None else bias.cuda(), out[:, :-1])
            assert out[:, -1].isnan().all()
            expected = x.double() @ weights.double().T + (0.0 if bias is None else bias.double())
            # Weights are rounded from numbers that may be others in float32. 3e-3: for those that some products round.
            assert_close(out[:, :-1], expected, 3e-3 if quant in UNROUNDED else 1e-3)
            added = torch.ones(tokens, len(weights), dtype=torch.bfloat16, device="cuda")
            multiply_some(panels, x.cuda(), None if bias is None else bias.cuda(), added, adds=True)
            assert_close(added, expected + 1, 6e-3)


@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (5632, 2048), (2080, 4096)])
@pytest.mark.parametrize("tokens", [3, 12, MOST_TOKENS])
def test_some_rows_with_a_norm(tokens: int, rows: int, columns: int, random_weights: Callable[..., Bytes]) -> None:
    """Of programs with one panel and with several, and of warps with one superblock and with several."""
    quants = ("Q4_0", "Q8_0") if columns % 256 else ("Q4_K", "Q5_K")
    made = [make_panels(random_weights, quant, rows // 2, columns, "cuda") for quant in quants]
    weights = torch.cat([one for _, one in made]).bfloat16()
    x = 30 * activations(tokens, columns, torch.bfloat16).cuda()
    for dtype in (torch.bfloat16, torch.float32):
        norm = RmsNorm(torch.rand(columns, device="cuda").to(dtype), 1e-5)
        out = torch.full((tokens, rows), torch.nan, device="cuda")
        multiply_some([one for one, _ in made], x, None, out, norm=norm)
        assert_close(out, add_rms_norm(x.clone(), *norm).cpu().double() @ weights.double().T, 4e-3)


@pytest.mark.parametrize("start", [1, 4, 8])
def test_some_rows_that_begin_anywhere(start: int, random_weights: Callable[..., Bytes]) -> None:
    panels, weights = make_panels(random_weights, "Q6_K", 40, 512, "cuda")
    x = activations(5, 523, torch.bfloat16).cuda()[:, start : start + 512]
    out = torch.full((5, 40), torch.nan, device="cuda")
    multiply_some([panels], x, None, out)
    assert_close(out, x.cpu().double() @ weights.double().T, 1e-5)
    with pytest.raises(ValueError, match="multiply_some"):
        multiply_some([panels], x.half(), None, out)


@pytest.mark.parametrize("quant", UNROUNDED)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(3, 40, 512), (16, 2400, 2048), (12, 2400, 4096)])
def test_codes_without_rounding(
    quant: str, tokens: int, rows: int, columns: int, random_weights: Callable[..., Bytes]
) -> None:
    """Of warps that hold x, and of warps that do not."""
    panels, weights = make_panels(random_weights, quant, rows, columns, "cuda")
    x = activations(tokens, columns, torch.bfloat16)
    out = torch.full((tokens, rows), torch.nan, device="cuda")
    multiply_some([panels], x.cuda(), None, out)
    assert_close(out, x.double() @ weights.double().T, 1e-5)


@pytest.mark.parametrize("columns", [2048, 2080, 2816, 4096])
@pytest.mark.parametrize("tokens", [5, 8, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_few_panels_by_clusters(
    columns: int, tokens: int, normed: bool, random_weights: Callable[..., Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give what programs with whole panels give, for one part and for two. In each call the same bits."""
    for rows in ((1,), (16, 16), (250, 90), (2048,)):
        quants = ("Q8_0", "Q4_1") if columns % 256 else ("Q4_K", "Q5_K")
        made = [make_panels(random_weights, *of, columns, "cuda")[0] for of in zip(quants, rows, strict=False)]
        x = activations(tokens, columns, torch.bfloat16).cuda()
        norm = RmsNorm(torch.rand(columns, device="cuda").bfloat16(), 1e-5) if normed else None
        bias = activations(1, sum(rows), torch.bfloat16)[0].cuda() if len(rows) > 1 else None

        def product() -> torch.Tensor:
            out = torch.full((tokens, sum(rows)), torch.nan, device="cuda")  # noqa: B023
            multiply_some(made, x, bias, out, norm=norm)  # noqa: B023
            return out

        with monkeypatch.context() as patch:
            patch.setattr(panel_clusters, "tile_of", lambda *_: None)
            expected = product()
        assert_close(product(), expected.cpu(), 1e-5)
        assert torch.equal(product(), product())


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_rows_that_begin_in_the_middle_of_a_word(start: int, random_weights: Callable[..., Bytes]) -> None:
    panels, weights = make_panels(random_weights, "Q4_K", 40, 512, "cuda")
    x = activations(2, 520, torch.bfloat16).cuda()[:, start : start + 512]
    for rows in (x, x[:1]):
        out = torch.full((len(rows), 40), torch.nan, device="cuda")
        multiply_few([panels], rows, None, out)
        assert_close(out, rows.cpu().double() @ weights.double().T, 1e-5)


@pytest.mark.parametrize(
    ("quants", "dtype"),
    [(("Q4_K", "Q6_K"), torch.bfloat16), (("Q8_0",), torch.float16), (("Q4_K",), torch.float32)],
)
def test_any_number_of_rows(quants: tuple[str, str], dtype: torch.dtype, random_weights: Callable[..., Bytes]) -> None:
    made = [make_panels(random_weights, quant, 272 + i, 512, "cuda") for i, quant in enumerate(quants)]
    buffer = DecodeBuffer(dtype, "cuda")
    weights = torch.cat([one for _, one in made])
    buffer.reserve(*weights.shape)
    linear = QuantisedLinear([one for one, _ in made], None, buffer)
    for tokens in (1, 3, 5, 16, 33, 300, 3000):
        x = activations(tokens, 512, dtype)
        got = linear(x.cuda())
        assert got.dtype == dtype
        assert_close(got, x.double() @ weights.double().T, {torch.float32: 5e-6}.get(dtype, 6e-3))


@pytest.mark.parametrize("tokens", [2, 40])
def test_in_a_graph(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    """Replays see new activations."""
    made = [make_panels(random_weights, quant, 256, 512, "cuda") for quant in ("Q4_K", "Q6_K")]
    buffer = DecodeBuffer(torch.bfloat16, "cuda")
    buffer.reserve(512, 512)
    linear = QuantisedLinear([one for one, _ in made], None, buffer)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x)
    for _ in range(2):
        x.copy_(torch.randn(tokens, 512))
        graph.replay()
        assert torch.equal(captured, linear(x))


def test_rows_far_away(random_weights: Callable[..., Bytes]) -> None:
    """Offsets beyond 32 bits."""
    panels, weights = make_panels(random_weights, "Q8_0", 64, 256, "cuda")
    repeats = (5 << 29) // panels.panels.numel()
    far = type(panels)(panels.panels.repeat(repeats), "Q8_0", 64 * repeats, 256)
    ids = torch.tensor([64 * (repeats - 1) + 17, 3])
    out = torch.empty(2, 256, device="cuda")
    far.decode(out, ids=ids.cuda())
    assert torch.equal(out.cpu(), weights[ids % 64])
    out = torch.empty(64, 256, device="cuda")
    far.decode(out, first=64 * (repeats - 1))
    assert torch.equal(out.cpu(), weights)
    x = activations(2, 256, torch.bfloat16)
    product = torch.empty(2, far.rows, device="cuda")
    multiply_few([far], x.cuda(), None, product)
    assert_close(product[:, -64:], x.double() @ weights.double().T, 1e-5)
