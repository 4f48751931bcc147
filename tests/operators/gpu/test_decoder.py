"""GpuDecoder compared with the transformers model that it replaces, on CPU tensors and on a GPU."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import (
    SEQUENCES,
    VOCAB,
    Cache,
    answers,
    feed,
    make_model,
    make_planner_for,
    token_error,
    tolerance,
)
from few_families import EVERY, on_each_device

from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu import pending_residual
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.experts import step as step_module
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers
from ktqueue.operators.gpu.kernels import norm, router
from ktqueue.operators.gpu.kernels.expert_products import experts
from ktqueue.operators.gpu.settings import GpuSettings

ALL = 1 << 40  # bytes
HALF_PRECISION = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "dots1",
    "gpt_oss",
    "llama4",
    "gemma4 with experts",
    "phimoe",
    "qwen3_next",
    "llama",
    "deepseek_v2 with groups",
    "deepseek_v3",
)
FLOAT16 = ("qwen2_moe", "gpt_oss", "gemma4 with experts", "qwen3_next", "deepseek_v3")
"""Those of them with sinks, norms in float32, states, latents, and neither."""
PLACES = (("qwen3_moe", "Q8_0"), ("qwen2_moe with dense layers", "F32"), ("deepseek_v3", "Q8_0"), ("llama4", "Q8_0"))
SHARES, STREAMED = (0.0, 0.5, 1.0), (None, 0.5, 1.0)
FEW_PLACES = [
    *((*PLACES[0], share, streamed) for share in SHARES for streamed in STREAMED if share < 1.0 or streamed == 0.5),
    *((*place, *shares) for place in PLACES[1:] for shares in ((0.0, 1.0), (0.5, 0.5), (1.0, None))),
]
ALONE = [{name: (0, len(ids))} for name, ids in SEQUENCES.items()]


def fed(decoder: GpuDecoder, steps: Any = None) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        found = feed(decoder, *([steps] if steps else []), device=decoder.device, planner=make_planner_for)
    decoder.after_step()
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, logits in expected.items():
        assert logits.std() > 0.1  # else equality would say little
        assert (found[name] - logits).abs().max() < tolerance * logits.abs().max()


@pytest.mark.parametrize("family", EVERY)
def test_logits_equal_those_of_transformers(family: str, make_decoder: Callable[..., Any]) -> None:
    model = make_model(family)
    assert_close(fed(make_decoder(model, expert_streaming="auto")), answers(model), tolerance(family))


@pytest.mark.parametrize(
    ("family", "dtype", "device"),
    on_each_device(
        [*((family, "bfloat16") for family in HALF_PRECISION), *((family, "float16") for family in FLOAT16)],
        itertools.product(HALF_PRECISION, ("bfloat16", "float16")),
    ),
)
def test_half_precision_is_as_exact_as_in_transformers(
    family: str, dtype: str, make_decoder: Callable[..., Any]
) -> None:
    """Both are compared with float32 arithmetic on the same rounded weights."""
    model = make_model(family).to(getattr(torch, dtype))
    expected = answers(make_model(family).to(model.dtype).float())
    found = fed(make_decoder(model))
    bound = 2.0 if family == "qwen3_next" else 1.25  # its states amplify rounding: over five seeds, 0.5 to 1.6
    assert token_error(found, expected) < bound * token_error(answers(model), expected)


@pytest.mark.parametrize("quant", ["BF16", "Q8_0"])
def test_the_decoder_equals_that_of_the_cpu_on_quantised_weights(
    quant: str, make_decoder: Callable[..., Any], given_weights: Callable[..., Any]
) -> None:
    model = make_model("qwen2_moe")
    other = CpuDecoder.from_module(model, activations="float32")
    other.load(given_weights(model, quant))
    assert_close(fed(make_decoder(model, quant)), feed(other), 1e-5)


def test_of_keys_with_equal_scores_the_first_are_chosen(
    make_decoder: Callable[..., Any], given_weights: Callable[..., Any]
) -> None:
    """If all scores are 0, the first twelve keys are chosen, so a change behind them does not reach the last token."""
    model = make_model("deepseek_v32", num_hidden_layers=1)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.indexer.weights_proj.weight)
    other = CpuDecoder.from_module(model)
    other.load(given_weights(model, "F32"))
    ids = SEQUENCES["s2"]
    expected = Cache(other).step({"s2": ids})
    for place, matters in ((11, True), (12, False), (38, False)):
        changed = [*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :]]
        assert torch.equal(Cache(other).step({"s2": changed})[-1], expected[-1]) is not matters
    found = fed(make_decoder(model), ALONE)["s2"]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def record_bytes(decoder: GpuDecoder) -> int:
    """Bytes of all routed experts in GPU format."""
    return int(decoder.statistics()["expert_bytes"])


@pytest.mark.parametrize(
    ("family", "quant", "share", "streamed", "device"),
    on_each_device(FEW_PLACES, ((*place, *rest) for place in PLACES for rest in itertools.product(SHARES, STREAMED))),
)
def test_experts_in_gpu_memory_change_nothing(
    family: str,
    quant: str,
    share: float,
    streamed: float | None,
    make_decoder: Callable[..., Any],
) -> None:
    """`share` of the experts have a slot there. Long steps stream the share `streamed` of the others."""
    model = make_model(family)
    streaming = {
        "expert_streaming": "off" if streamed is None else "on",
        "streamed_share": streamed,
        "streaming_tokens": 8,
    }
    plain = make_decoder(model, quant)
    expected = fed(plain)
    decoder = make_decoder(model, quant, expert_memory_bytes=int(share * record_bytes(plain)), **streaming)
    for _ in range(2):
        assert_close(fed(decoder), expected, 1e-5)
    found = decoder.statistics()
    assert found["experts_on_gpu"] == round(share * found["experts"])
    assert (decoder.expert_layers_run == 0) == (share == 1)
    streams = found["expert_streamed_steps"] > 0
    assert streams == (found["expert_streamed_bytes"] > 0) == (streamed is not None and share < 1)


@pytest.mark.parametrize("fetched", [0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(("family", "quant"), [("qwen3_moe", "Q8_0"), ("qwen2_moe with dense layers", "F32")])
def test_fetched_experts_change_nothing(
    family: str, quant: str, share: float, fetched: float, make_decoder: Callable[..., Any]
) -> None:
    model = make_model(family)
    plain = make_decoder(model, quant)
    expected = fed(plain)
    settings = {"expert_streaming": "on", "fetched_shares": (fetched, fetched)}
    decoder = make_decoder(model, quant, expert_memory_bytes=int(share * record_bytes(plain)), **settings)
    for _ in range(2):
        assert_close(fed(decoder), expected, 1e-5)
    short, all_of_it = decoder.handoff_statistics, plain.handoff_statistics
    assert short.experts_used < (1 - share) * 2 * all_of_it.experts_used  # the CPU's part
    assert (short.experts_used == 0) == (fetched == 1.0)
    statistics = decoder.statistics()
    assert (statistics["expert_fetched_share_one"], statistics["expert_fetched_share_several"]) == (fetched, fetched)


def test_a_captured_step_fetches_nothing_while_another_streams_all_experts(make_decoder: Callable[..., Any]) -> None:
    decoder = make_decoder(make_model("qwen3_moe"), expert_streaming="on", fetched_shares=(1.0, 1.0))
    memory, ids = decoder._experts, torch.tensor([[1, 3]], device=decoder.device)
    with torch.inference_mode():
        captured = memory.step(1, 1, decodes=True, captured=True)
        found = []
        for change in (lambda: None, lambda: memory.step(100, 100, decodes=False, captured=False, overlapped=True)):
            change()
            left = torch.zeros_like(ids)
            captured._residency.choose(0, ids, left)
            found.append(left.tolist())
        memory.end_overlap()
        captured._residency.choose(0, ids, left)
    assert [*found, left.tolist()] == [[[-1, -1]], [[1, 3]], [[-1, -1]]]


@pytest.mark.parametrize(("dense", "may"), [("dequantised", True), ("both", True), ("quantised", False)])
def test_steps_that_decode_to_the_same_memory_do_not_overlap(
    dense: str, may: bool, make_decoder: Callable[..., Any]
) -> None:
    assert make_decoder(make_model("qwen3_moe"), "Q8_0", dense=dense, expert_streaming="on").may_overlap == may
    assert not make_decoder(make_model("qwen3_moe"), "Q8_0", dense=dense).may_overlap


@pytest.mark.parametrize(("one_token", "several_tokens"), [(0.0, 1.0), (1.0, 0.0), (0.5, 1.0)])
def test_steps_of_one_token_have_their_own_share(
    one_token: float, several_tokens: float, make_decoder: Callable[..., Any]
) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    expected = fed(make_decoder(model))
    decoder = make_decoder(model, expert_streaming="auto", fetched_shares=(one_token, several_tokens))
    assert_close(fed(decoder), expected, 1e-5)
    cache = Cache(decoder, device=decoder.device, planner=make_planner_for)
    with torch.inference_mode():
        for rows, share in (({"a": [5], "b": [6, 7]}, several_tokens), ({"a": [8]}, one_token)):
            used = decoder.handoff_statistics.experts_used
            cache.step(rows)
            decoder.after_step()
            on_cpu = decoder.handoff_statistics.experts_used - used
            assert on_cpu == 4 * (1 - share) if len(rows) == 1 else (on_cpu == 0) == (share == 1)


@pytest.mark.parametrize(("asked", "exact"), [("float32", True), ("int8", False)])
def test_the_activations_option_decides_whether_the_gpu_may_round(
    asked: str, exact: bool, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def spied(*args: Any, exact: bool, **options: Any) -> torch.Tensor:
        seen.add(exact)
        return experts(*args, exact=exact, **options)

    monkeypatch.setattr(step_module, "experts", spied)
    fed(make_decoder(make_model("qwen3_moe").bfloat16(), "Q8_0", activations=asked, expert_memory_bytes=ALL))
    assert seen == {exact}


def test_norms_and_router_use_the_memory_of_the_hand_off(
    make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms and the router write a task's input to the memory that the CPU reads. The next norm reads the result
    from the memory that the CPU writes."""
    buffers, add_rms_norm, route = Handoff.buffers, norm.add_rms_norm, router.route
    places: dict[str, list[int]] = {name: [] for name in (*HandoffBuffers._fields, "copy", "added")}
    for_cpu: list[tuple[int, ...]] = []

    def note_buffers(*arguments: Any, **options: Any) -> Any:
        found = buffers(*arguments, **options)
        for name, tensor in found._asdict().items():
            places[name].append(tensor.data_ptr())
        return found

    def note_norm(*arguments: Any, **options: Any) -> Any:
        for name in ("copy", "added"):
            if options.get(name) is not None:
                places[name].append(options[name].data_ptr())
        return add_rms_norm(*arguments, **options)

    def note_router(*arguments: Any, **options: Any) -> Any:
        if options["for_cpu"]:
            for_cpu.append(tuple(tensor.data_ptr() for tensor in options["for_cpu"]))
        return route(*arguments, **options)

    monkeypatch.setattr(Handoff, "buffers", note_buffers)
    monkeypatch.setattr(pending_residual, "add_rms_norm", note_norm)
    monkeypatch.setattr(step_module, "route", note_router)
    model = make_model("qwen2_moe")
    decoder = make_decoder(model, expert_memory_bytes=50_000)
    assert_close(fed(decoder), answers(model), 1e-5)
    assert decoder.expert_layers_run == len(places["x"]) > 0
    assert places["copy"] == places["x"]
    rows = [addresses for addresses in for_cpu if addresses[0] not in places["predicted"]]
    assert rows == list(zip(places["cpu_ids"], places["weights"], strict=True))
    assert [place for place in places["added"] if place in places["result"]] == places["result"]


def test_only_scored_tokens_are_computed(make_decoder: Callable[..., Any], device: str) -> None:
    decoder = make_decoder(make_model("qwen2_moe"))
    chunks = {name: ids[:-1] for name, ids in SEQUENCES.items()}
    whole, some, none = (Cache(decoder, device=device, planner=make_planner_for) for _ in range(3))
    scored = [3, 25, 26, 60]
    torch.testing.assert_close(some.step(chunks, scored), whole.step(chunks)[scored])
    assert none.step(chunks, []).shape == (0, VOCAB)
    ends = {name: ids[-1:] for name, ids in SEQUENCES.items()}
    expected = whole.step(ends)
    torch.testing.assert_close(some.step(ends), expected)
    torch.testing.assert_close(none.step(ends), expected)  # by the cache


def test_padding_tokens_change_nothing_and_are_not_counted(make_decoder: Callable[..., Any], device: str) -> None:
    decoder = make_decoder(make_model("qwen3_moe"), expert_memory_bytes=50_000)
    alone, padded = (Cache(decoder, device=device, planner=make_planner_for) for _ in range(2))
    with torch.inference_mode():
        expected = alone.step({"a": [3, 4, 5]})
        counted = decoder._experts._placement.counts.clone()
        found = padded.step({"a": [3, 4, 5], "padding": [0]}, live_tokens=3)[:3]
    torch.testing.assert_close(found, expected)
    assert counted.sum() == 3 * 3 * 2  # layers, tokens, experts a token
    assert torch.equal(decoder._experts._placement.counts, 2 * counted)


def test_captured_steps_stream_nothing(make_decoder: Callable[..., Any], device: str) -> None:
    """Their number of rows does not matter, since a replay cannot choose again."""
    decoder = make_decoder(make_model("qwen3_moe"), expert_streaming="on", streamed_share=0.5, streaming_tokens=2)
    cache = Cache(decoder, device=device, planner=make_planner_for)
    streamed = []
    with torch.inference_mode():
        for live in (None, 3, None):
            cache.step({"a": [3], "b": [4], "c": [5]}, live_tokens=live)
            decoder.after_step()
            streamed.append(decoder.statistics()["expert_streamed_steps"])
    assert streamed == [1, 1, 2]


def test_bytes_are_reported_by_device(make_decoder: Callable[..., Any], device: str) -> None:
    model = make_model("qwen3_moe")
    held = make_decoder(model).device_bytes()
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    rotary = 256 * 32 * 4  # cosines and sines of all positions
    assert experts + dense + rotary <= sum(held.values()) < experts + dense + rotary + 4096
    assert device == "cpu" or held["cpu"] == experts


def test_unknown_models_and_options_are_refused(make_decoder: Callable[..., Any], device: str) -> None:
    with pytest.raises(ValueError, match="Linear cannot be replaced by GpuDecoder: it knows AXK1ForCausalLM, "):
        GpuDecoder.from_module(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="it computes in float32 or bfloat16 or float16, but the model"):
        GpuDecoder.from_module(make_model("qwen3").double())
    with pytest.raises(ValueError, match="GpuDecoder knows no option 'speed'"):
        GpuDecoder.from_module(make_model("qwen3"), speed=1)
    fresh = GpuDecoder.from_module(make_model("qwen3"))
    with pytest.raises(RuntimeError, match="no weights yet"):
        fresh.prepare_device(GpuSettings(max_tokens=1))
    with pytest.raises(RuntimeError, match="not prepared yet"):
        feed(fresh, planner=make_planner_for)
    if device == "cpu":
        with pytest.raises(ValueError, match="a step of GpuDecoder needs `attention`"):
            feed(make_decoder(make_model("qwen3")))
