"""Ways to compute a step that are off: they compute what GpuDecoder usually does, on CPU tensors and on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import (
    LATENT_FAMILIES,
    make_model,
    token_error,
)

from ktqueue.operators.gpu import latent_layer
from ktqueue.operators.gpu import layer as layer_module
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.gpu.experts import memory as memory_module
from ktqueue.operators.gpu.experts import step as step_module
from ktqueue.operators.gpu.experts.step import StepExperts
from ktqueue.operators.gpu.kernels import decoded_experts
from ktqueue.operators.gpu.kernels.expert_products import experts
from ktqueue.operators.gpu.kernels.expert_tiles import TILES
from ktqueue.operators.gpu.kernels.linear import few_rows_gated
from ktqueue.operators.gpu.kernels.operation import launch_options
from ktqueue.operators.gpu.settings import Trials
from ktqueue.operators.gpu.side_stream import SideStream

from .test_decoder import assert_close, fed, record_bytes


@pytest.mark.parametrize("streamed", [0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe with dense layers", "deepseek_v3", "llama4", "gpt_oss"])
def test_decoded_experts_change_nothing(
    family: str, share: float, streamed: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of eight tokens or more decode experts, those in slots and those that are streamed. All others do not."""
    model = make_model(family)
    plain = make_decoder(model, "Q8_0")
    expected = fed(plain)
    decoder = make_decoder(
        model,
        "Q8_0",
        trials=Trials(decode_experts=True, decode_from=8),
        expert_memory_bytes=int(share * record_bytes(plain)),
        expert_streaming="on",
        streamed_share=streamed,
        streaming_tokens=8,
    )
    if torch.device(decoder.device).type == "cuda":
        pytest.skip("torch's grouped product takes no float32 on a GPU")
    decoded: list[int] = []
    compute = decoded_experts.experts

    def noted(pairs: Any, *rest: Any) -> torch.Tensor:
        decoded.append(len(pairs.ids))
        return compute(pairs, *rest)

    monkeypatch.setattr(decoded_experts, "experts", noted)
    assert_close(fed(decoder), expected, 1e-5)
    assert decoded and min(decoded) >= 8
    assert sum(decoder.device_bytes().values()) > sum(plain.device_bytes().values())


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rounding_beside_the_router_changes_no_bit(
    share: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens round the experts' input in the router's launch; the experts then prepare nothing."""
    model = make_model("qwen3_moe").to(torch.bfloat16)
    plain = make_decoder(model, "Q8_0")
    memory = int(share * record_bytes(plain))
    usual = make_decoder(model, "Q8_0", activations="int8", expert_memory_bytes=memory)
    early = make_decoder(
        model, "Q8_0", activations="int8", expert_memory_bytes=memory, trials=Trials(round_beside_router=True)
    )
    expected = fed(usual)
    given: list[bool] = []

    def noted(pairs: Any, *rest: Any, **options: Any) -> torch.Tensor:
        few = pairs.ids.numel() <= TILES.own_pairs
        assert (options["rows"] is not None) == few
        given.append(few)
        return experts(pairs, *rest, **options)

    monkeypatch.setattr(step_module, "experts", noted)
    found = fed(early)
    assert all(torch.equal(found[name], logits) for name, logits in expected.items())
    assert True in given and False in given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_of_fewer_launches_says_the_same(
    family: str, dtype: torch.dtype, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU tensors, twins compute the same bits."""
    model = make_model(family).to(dtype)
    expected = fed(make_decoder(model))
    fused: list[torch.Tensor] = []

    def noted(*arguments: Any, **named: Any) -> torch.Tensor:
        fused.append(latent_query_append(*arguments, **named))
        return fused[-1]

    monkeypatch.setattr(latent_layer, "latent_query_append", noted)
    decoder = make_decoder(model, trials=Trials(fused_latents=True, joined_values=True))
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
    expected = fed(make_decoder(model, "Q8_0", expert_memory_bytes=memory))
    decoder = make_decoder(model, "Q8_0", expert_memory_bytes=memory, trials=Trials(shared_beside_experts=True))
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
    expected = fed(make_decoder(model))
    matrices: set[int] = set()

    def noted(activation: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        matrices.add(weight.data_ptr())
        return few_rows_gated(activation, x, weight)

    monkeypatch.setattr(layer_module, "few_rows_gated", noted)
    decoder = make_decoder(model, trials=Trials(gated_products=True))
    assert token_error(fed(decoder), expected) < 1e-2
    assert len(matrices) == len(decoder.facts.layers)


@pytest.mark.parametrize("trials", [Trials(), Trials(dependent_launches=True)])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_kernels_are_launched_early_if_all_experts_are_on_the_gpu(
    share: float, trials: Trials, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3_moe")
    memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
    asked: list[dict[str, bool]] = []

    def noted(*arguments: Any, **options: Any) -> StepExperts:
        asked.append(launch_options())
        return StepExperts(*arguments, **options)

    monkeypatch.setattr(memory_module, "StepExperts", noted)
    fed(make_decoder(model, "Q8_0", expert_memory_bytes=memory, trials=trials))
    early = {"WAITS": True, "launch_pdl": True}
    assert asked[-1] == (early if trials.dependent_launches and share == 1 else {"WAITS": False})
