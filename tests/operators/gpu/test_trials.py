"""Launches that are joined, or beside others, compute what separate ones do, on CPU tensors and on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import Cache, make_model, token_error
from latent_families import LATENT_FAMILIES

from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu import latent_layer
from ktqueue.operators.gpu import layer as layer_module
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.gpu.attention.triton import TritonPlanner
from ktqueue.operators.gpu.experts.step import StepExperts
from ktqueue.operators.gpu.kernels import linear
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import few_rows_gated, few_rows_linear
from ktqueue.operators.gpu.kernels.operation import kernels_on_any_device
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.gpu.settings import Trials
from ktqueue.operators.gpu.side_stream import SideStream
from ktqueue.operators.kv_cache import KVLayout, store
from ktqueue.operators.latent_shape import LatentShape, absorb_query, make_key, rotate_query

from .test_decoder import assert_close, fed, record_bytes


def separate_launches(
    query: torch.Tensor, key: torch.Tensor, shape: LatentShape, *, norm: torch.Tensor, key_up: torch.Tensor | None,
    cosine: torch.Tensor, sine: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """What latent_query_append does, by torch's operations on any device."""
    cosine, sine = cosine[positions], sine[positions]
    store(cache.flatten(0, 1), slot_mapping, make_key(key, norm, cosine, sine, shape)[:, None], scale)
    if key_up is None:
        return rotate_query(query, cosine, sine, shape)
    return absorb_query(query, key_up, cosine, sine, shape)


@pytest.mark.parametrize("dense", ["dequantised", "quantised"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2"])
def test_few_rows_of_fewer_launches_say_the_same(
    family: str, dense: str, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU tensors, twins compute the same bits, except for the order in which pairs are added. Shared experts do not
    take part."""
    model = make_model(family).to(torch.bfloat16)
    decoder = make_decoder(model, "Q8_0", activations="int8", dense=dense, expert_memory_bytes=1 << 40)
    with monkeypatch.context() as patched:
        patched.setattr(StepExperts, "adds_to", lambda *_: False)
        expected = fed(decoder)
    joined: list[int] = []
    add_to = StepExperts.add_to

    def noted(self: StepExperts, index: int, residual: torch.Tensor, *rest: Any) -> None:
        joined.append(len(residual))
        add_to(self, index, residual, *rest)

    monkeypatch.setattr(StepExperts, "add_to", noted)
    found = fed(decoder)
    assert (set(joined) <= {1, 2, 3, 4}) and bool(joined) == (family != "deepseek_v2")
    assert token_error(found, expected) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_of_fewer_launches_says_the_same(
    family: str, dtype: torch.dtype, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU tensors, twins compute the same bits."""
    model = make_model(family).to(dtype)
    monkeypatch.setattr(latent_layer, "latent_query_append", separate_launches)
    expected = fed(make_decoder(model))
    monkeypatch.undo()
    fused: list[torch.Tensor] = []

    def noted(*arguments: Any, **named: Any) -> torch.Tensor:
        fused.append(latent_query_append(*arguments, **named))
        return fused[-1]

    monkeypatch.setattr(latent_layer, "latent_query_append", noted)
    decoder = make_decoder(model)
    found = fed(decoder)
    assert fused and fused[-1].dtype == dtype
    assert token_error(found, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    if decoder.device == "cpu":
        assert all(torch.equal(found[name], logits) for name, logits in expected.items())


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen2_moe with dense layers", "deepseek_v3", "gemma4 with experts"])
def test_shared_experts_beside_the_others_change_nothing(
    family: str, share: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode steps they begin before the router, if no expert is on the CPU."""
    model = make_model(family)
    plain = make_decoder(model, "Q8_0")
    memory = int(share * record_bytes(plain))
    behind = Trials(shared_beside_experts=False)
    expected = fed(make_decoder(model, "Q8_0", expert_memory_bytes=memory, trials=behind))
    decoder = make_decoder(model, "Q8_0", expert_memory_bytes=memory)
    begun: list[int] = []

    def noted(stream: SideStream, work: Any, x: torch.Tensor) -> Any:
        begun.append(len(x))
        return start(stream, work, x)

    start = SideStream.start
    monkeypatch.setattr(SideStream, "start", noted)
    assert_close(fed(decoder), expected, 1e-5)
    assert bool(begun) == (share == 1.0 and not family.startswith("gemma4"))


def test_gate_and_up_may_be_joined_in_their_product(
    make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of dense layers and of shared experts."""
    model = make_model("qwen2_moe with dense layers").to(torch.bfloat16)
    monkeypatch.setattr(layer_module, "few_rows_gated", lambda kind, x, weight: gated(kind, few_rows_linear(x, weight)))
    expected = fed(make_decoder(model))
    matrices: set[int] = set()

    def noted(activation: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        matrices.add(weight.data_ptr())
        return few_rows_gated(activation, x, weight)

    monkeypatch.setattr(layer_module, "few_rows_gated", noted)
    decoder = make_decoder(model)
    assert token_error(fed(decoder), expected) < 1e-2
    assert len(matrices) == len(decoder.facts.layers)


@pytest.mark.parametrize(("rows", "dense"), [(1, "quantised"), (2, "dequantised")])
def test_a_layer_of_few_rows_takes_eight_launches(
    rows: int, dense: str, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All by kernels, which the interpreter runs."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on this machine")
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(linear, "_PROGRAMS", 1)  # of as many outputs as a program may have
    decoder = make_decoder(
        make_model("qwen3_moe", num_hidden_layers=2).bfloat16(),
        "Q8_0",
        activations="int8",
        dense=dense,
        expert_memory_bytes=1 << 40,
    )
    launched: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        launched.append(self.fn.__name__)
        launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)

    def planner(layout: KVLayout, facts: DecoderFacts, device: str) -> TritonPlanner:
        sizes: Any = {"scaling": facts.scaling, "windows": (0,), "device": device, "dtype": facts.dtype}
        return TritonPlanner(AttentionShape(layout=layout, heads=facts.heads, **sizes))

    def counted() -> tuple[torch.Tensor, list[str]]:
        cache = Cache(decoder, device="cpu", planner=planner)
        launched.clear()
        with torch.inference_mode(), kernels_on_any_device():
            return cache.step({str(row): [5 + row] for row in range(rows)}), [*launched]

    found, few = counted()
    monkeypatch.setattr(StepExperts, "adds_to", lambda *_: False)
    monkeypatch.setattr(PendingResidual, "is_empty", False)
    expected, usual = counted()
    around = 3  # embeddings, the last norm, the head
    layers = len(decoder.facts.layers)
    assert (len(few), len(usual)) == (around + 8 * layers, around + 11 * layers)
    torch.testing.assert_close(found, expected, atol=2e-2 * expected.abs().max().item(), rtol=0)
