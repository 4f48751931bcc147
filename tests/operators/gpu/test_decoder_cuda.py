"""GpuDecoder on a GPU: captured decode steps, both methods of the hand-off, tables that change between replays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.gpu import decoder as decoder_module
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.device import launches_dependents
from ktqueue.operators.gpu.experts import step
from ktqueue.operators.gpu.experts.placement import READ_EVERY_STEPS
from ktqueue.operators.gpu.settings import Trials

from .captured_steps import Captured

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def device() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return "cuda"


def record_bytes(decoder: GpuDecoder) -> int:
    return int(decoder.statistics()["expert_bytes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["flags", "host_functions"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "llama4", "gemma4 with experts"])
def test_captured_steps_equal_eager_ones(
    family: str, share: float, method: str, dtype: torch.dtype, make_decoder: Callable[..., Any]
) -> None:
    model = make_model(family).to(dtype)
    memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
    decoder = make_decoder(model, "Q8_0", handoff=method, expert_memory_bytes=memory)
    eager, replayed = (Cache(decoder, device="cuda", planner=make_planner_for) for _ in range(2))
    replayed._free.remove(replayed.kv.pages - 1)  # the scratch page: see Captured
    with torch.inference_mode():
        captured = Captured(decoder, replayed)
        prompts = {name: ids[:-5] for name, ids in SEQUENCES.items() if len(ids) > 5} | {"s0": SEQUENCES["s0"][:1]}
        for cache in (eager, replayed):
            cache.step(prompts)
        for i in range(2 * READ_EVERY_STEPS):  # experts move meanwhile
            tokens = {name: (7 * i + len(name)) % 90 for name in prompts}
            if i >= 4:
                tokens = dict.fromkeys(prompts, i % 3)
            expected = eager.step({name: [token] for name, token in tokens.items()})
            decoder.after_step()
            found = captured.step(tokens)
            decoder.after_step()
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found, expected, atol=tolerance * expected.abs().max().item(), rtol=0)
    if share == 0.5:
        assert decoder.statistics()["expert_hit_rate"] > 0
    if share < 1:
        with torch.inference_mode():
            for i in range(20):  # the CPU predicts only while no request waits: seldom beside other processes
                if decoder.statistics()["expert_prediction_hits"]:
                    break
                captured.step(dict.fromkeys(prompts, i % 3))
        assert (decoder.statistics()["expert_prediction_hits"] > 0) == (method == "flags")


@pytest.mark.parametrize(
    "trials",
    [
        Trials(shared_beside_experts=False),
        Trials(),
    ],
    ids=["early", "beside"],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "llama4", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_steps_of_other_launches_compute_the_same(
    activations: str, family: str, trials: Trials, make_decoder: Callable[..., Any]
) -> None:
    """Captured steps, whose kernels are launched early, are compared with eager ones."""
    model, everything = make_model(family).to(torch.bfloat16), 1 << 40
    usual, early = (
        make_decoder(model, "Q8_0", activations=activations, expert_memory_bytes=everything, trials=other)
        for other in (Trials(shared_beside_experts=False), trials)
    )
    prompts = {"s0": SEQUENCES["s0"][:1], "s1": SEQUENCES["s1"][:9]}
    with torch.inference_mode():
        expected, found = (Cache(decoder, device="cuda", planner=make_planner_for) for decoder in (usual, early))
        found._free.remove(found.kv.pages - 1)  # the scratch page: see Captured
        captured = Captured(early, found)
        for cache in (expected, found):
            cache.step(prompts)
        for i in range(20):
            tokens = {name: (7 * i + len(name)) % 90 for name in prompts}
            logits = expected.step({name: [token] for name, token in tokens.items()})
            replayed = captured.step(tokens)
            torch.testing.assert_close(replayed, logits, atol=0.1 * logits.abs().max().item(), rtol=0)


@pytest.mark.parametrize("rows", [7, 20])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_some_rows_compute_the_same_in_fewer_launches(
    family: str, rows: int, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps whose router and products are those of some rows are compared with eager ones without them."""
    model, everything = make_model(family).to(torch.bfloat16), 1 << 40
    decoder = make_decoder(model, "Q8_0", activations="int8", expert_memory_bytes=everything)
    prompts = {f"s{i}": SEQUENCES["s1"][: 1 + i % 5] for i in range(rows)}
    with torch.inference_mode():
        expected, found = (Cache(decoder, 128, device="cuda", planner=make_planner_for) for _ in range(2))
        found._free.remove(found.kv.pages - 1)  # the scratch page: see Captured
        captured = Captured(decoder, found, rows=rows)
        monkeypatch.setattr(step, "has_some_rows", lambda *_: False)
        for cache in (expected, found):
            cache.step(prompts)
        for i in range(10):
            tokens = {name: (7 * i + place) % 90 for place, name in enumerate(prompts)}
            logits = expected.step({name: [token] for name, token in tokens.items()})
            replayed = captured.step(tokens)
            torch.testing.assert_close(replayed, logits, atol=0.1 * logits.abs().max().item(), rtol=0)


@pytest.mark.parametrize("method", ["flags", "host_functions"])
@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (1, 1), (2, 0), (3, 1), (9, 1)])
def test_early_launches_beside_the_cpu_change_no_bit(
    rows: int, padding: int, fetches: bool, method: str, make_decoder: Callable[..., Any], monkeypatch: Any
) -> None:
    """Experts stay where they are. Steps before the first token are not compared: all their rows write one slot."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
    model = make_model("qwen3_moe", num_hidden_layers=6, **sizes).to(torch.bfloat16)
    options: dict[str, Any] = {"handoff": method, "expert_memory_bytes": record_bytes(make_decoder(model, "Q8_0")) // 2}
    options |= {"expert_streaming": "auto", "fetched_shares": (0.5, 0.5)} if fetches else {}
    names = [f"row {row}" for row in range(rows)]
    found, cpu_experts = [], []
    for early in (False, True):
        monkeypatch.setattr(
            decoder_module, "launches_dependents", lambda device, early=early: early and launches_dependents(device)
        )
        decoder = make_decoder(model, "Q8_0", activations="int8", **options)
        cache = Cache(decoder, 128, device="cuda", planner=make_planner_for)
        cache._free.remove(cache.kv.pages - 1)  # the scratch page: see Captured
        with torch.inference_mode():
            captured = Captured(decoder, cache, rows=rows, padding=padding)
            cache.step({name: [3 + row, 5, 2 * row + 1] for row, name in enumerate(names)})
            before = decoder.expert_work().cpu_experts
            steps = [{name: (7 * i + 3 * row) % 90 for row, name in enumerate(names)} for i in range(40)]
            found.append(torch.stack([captured.step(tokens) for tokens in steps]))
        assert decoder.handoff is not None
        decoder.handoff.check()
        cpu_experts.append(decoder.expert_work().cpu_experts - before)
    differing = (found[0] != found[1]).flatten(1).any(1).nonzero().flatten().tolist()
    assert found[0].isfinite().all()
    assert differing == [], "steps with other bits"
    assert cpu_experts[0] == cpu_experts[1] > 0


@pytest.mark.parametrize("streamed", [0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "llama4"])
def test_long_steps_by_warpgroups_say_the_same(
    family: str, share: float, streamed: float, make_decoder: Callable[..., Any]
) -> None:
    """Experts in slots, streamed and on the CPU; beside packed ones, of which none is decoded."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU has no warpgroups")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    model, tokens = make_model(family, **sizes).to(torch.bfloat16), [(7 * i) % 90 for i in range(120)]
    found = []
    for trials in (Trials(warpgroups=False), Trials()):
        memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
        decoder = make_decoder(
            model, "Q8_0", trials=trials, expert_memory_bytes=memory, expert_streaming="on", streamed_share=streamed,
            streaming_tokens=64, decode_experts_from=200,
        )  # fmt: skip
        assert bool(decoder._experts._warpgroups) == trials.warpgroups
        cache = Cache(decoder, device="cuda", planner=make_planner_for)
        with torch.inference_mode():
            found.append([cache.step({"long": tokens}), cache.step({"long": [3]})])
        decoder.after_step()
    one, other = map(torch.cat, found)
    moved = (one - other).abs().amax(1) / one.abs().max()
    # If weights of experts move by 0.3 %, up to 5 of 120 tokens get other experts here, and logits beyond this bound.
    assert (moved > 0.1).sum() <= 6
    assert moved.median() < 0.05


def test_a_model_on_the_gpu_may_have_experts_on_the_cpu(
    tiny_model: Callable[..., Any], given_weights: Callable[..., Any]
) -> None:
    """This is how rules/modules.yaml does it: tensors are copied to the host and back."""
    experts = tiny_model().model.layers[0].mlp.experts
    operator = CpuExperts.from_module(experts, activations="float32")
    operator.load(given_weights(experts, "F32"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [5, 2], [3, 3], [1, 0], [2, 4], [5, 5], [0, 4]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    expected = operator(x, ids, weights)
    found = operator(x.cuda(), ids.cuda(), weights.cuda())
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), expected)
