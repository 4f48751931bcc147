"""Uses of routed experts on a GPU: counted wherever experts are computed, and what moves by them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import Cache, feed, make_model, make_planner_for

from ktqueue.core.expert_work import ExpertWork, PlacesExperts
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.experts.placement import READ_EVERY_STEPS
from ktqueue.operators.gpu.experts.use_order import LEAST_TOKENS
from ktqueue.workers.startup.expert_history import ExpertHistory, UsesFile


def fed(decoder: GpuDecoder, steps: Any = None) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        found = feed(decoder, *([steps] if steps else []), device=decoder.device, planner=make_planner_for)
    decoder.after_step()
    return found


def record_bytes(decoder: GpuDecoder) -> int:
    """Bytes of all routed experts in GPU format."""
    return int(decoder.statistics()["expert_bytes"])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_uses_of_experts_are_counted_wherever_they_are_computed(share: float, make_decoder: Callable[..., Any]) -> None:
    """Of experts that are all on the GPU they are not known. They may be some steps old."""
    model = make_model("qwen3_moe", num_hidden_layers=2)
    on_cpu = CpuDecoder.from_module(model, activations="float32")
    plain = make_decoder(model)
    decoder = make_decoder(model, expert_memory_bytes=int(share * record_bytes(plain)))
    one_token = [{"s0": (0, 1)}]
    for _ in range(3 * READ_EVERY_STEPS):
        fed(decoder, one_token)
    uses, work = decoder.expert_uses(), decoder.expert_work()
    if share == 1:
        assert uses is None
        assert work == ExpertWork()
        return
    assert on_cpu.facts.layers[0].router is not None
    chosen = on_cpu.facts.layers[0].router.chosen
    assert [len(layer) for layer in uses] == [on_cpu.facts.layers[0].router.experts] * 2
    counted = {sum(layer) for layer in uses}
    assert len(counted) == 1  # each layer has as many
    assert counted.pop() // chosen in range(READ_EVERY_STEPS, 3 * READ_EVERY_STEPS + 1)
    assert all(sum(count > 0 for count in layer) == chosen for layer in uses)  # the same token again and again
    assert work.cpu_runs == 2 * 3 * READ_EVERY_STEPS
    assert (work.cpu_bytes > 0, work.cpu_seconds > 0) == (work.cpu_experts > 0, True)


def test_experts_that_are_used_often_move_to_the_gpu(make_decoder: Callable[..., Any]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    plain = make_decoder(model)
    decoder = make_decoder(model, expert_memory_bytes=record_bytes(plain) // 3)
    cache, expected = (
        Cache(model_under_test, device=decoder.device, planner=make_planner_for)
        for model_under_test in (decoder, plain)
    )
    with torch.inference_mode():
        for i in range(8 * READ_EVERY_STEPS):
            chunk = {str(i): [3, 4, 5, 3, 4]}  # the same few experts again and again
            torch.testing.assert_close(cache.step(chunk), expected.step(chunk), atol=1e-4, rtol=1e-4)
            for sequences in (cache, expected):
                sequences.end(str(i))
            if decoder.device == "cuda":
                torch.cuda.synchronize()
            decoder.after_step()
    found = decoder.statistics()
    assert found["experts_on_gpu"] == 4 and 1 <= found["expert_moves"] <= 4
    assert found["expert_hit_rate"] > 0.5


def test_experts_of_earlier_runs_are_on_the_gpu_from_the_first_step(make_decoder: Callable[..., Any]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    plain = make_decoder(model)
    decoder = make_decoder(model, expert_memory_bytes=record_bytes(plain) // 2)
    counts: PlacesExperts = decoder
    assert counts.depends_on_uses and not plain.depends_on_uses
    one_token = [{"s0": (0, 1)}]
    expected = fed(plain, one_token)
    for _ in range(2 * READ_EVERY_STEPS):
        fed(decoder, one_token)
    uses = decoder.expert_uses()
    assert any(map(any, uses))
    decoder.place_experts(uses)
    before = decoder.expert_work().cpu_experts
    torch.testing.assert_close(fed(decoder, one_token), expected, atol=1e-4, rtol=1e-4)
    assert decoder.expert_work().cpu_experts == before  # all of this token's are there
    with pytest.raises(ValueError, match="2 layers"):
        decoder.place_experts(uses[:1])


@pytest.mark.parametrize("known", [False, True])
def test_long_steps_copy_the_experts_that_are_used_most(known: bool, make_decoder: Callable[..., Any]) -> None:
    """They learn which ones, and begin with those of the worker before. Answers stay the same."""
    model = make_model("qwen3_moe", num_hidden_layers=2)
    options = {"expert_streaming": "on", "streamed_share": 0.5, "streaming_tokens": 2}
    decoder, long_step = make_decoder(model, **options), [{"s2": (0, 32)}]
    expected = fed(make_decoder(model), long_step)
    if known:
        uses = make_decoder(model)
        fed(uses, long_step)
        decoder.place_experts([[LEAST_TOKENS * count for count in layer] for layer in uses.expert_uses()])
    on_cpu = []
    for _ in range(2 + (0 if known else LEAST_TOKENS // 32 + 2)):
        before = sum(map(sum, decoder._experts.handoff.uses))
        torch.testing.assert_close(fed(decoder, long_step), expected, atol=1e-4, rtol=1e-4)
        on_cpu.append(sum(map(sum, decoder._experts.handoff.uses)) - before)
    assert on_cpu[-1] < sum(map(sum, decoder.expert_uses())) / len(on_cpu) / 2
    assert known == (on_cpu[0] == on_cpu[-1])
    assert decoder.depends_on_uses
    found = decoder.statistics()
    assert found["expert_uses"] == sum(map(sum, decoder.expert_uses())) > found["expert_uses_on_gpu"] == 0
    assert "expert_hit_rate" not in found


def test_experts_are_where_the_worker_before_used_them(make_decoder: Callable[..., Any], tmp_path: Path) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    memory = record_bytes(make_decoder(model)) // 2
    one_token = [{"s0": (0, 1)}]
    computed = []
    for _ in range(2):
        decoder = make_decoder(model, expert_memory_bytes=memory)
        uses = decoder.expert_uses()
        history = ExpertHistory(UsesFile(tmp_path, "ab" * 32, [len(layer) for layer in uses]), decoder)
        before = decoder.expert_work().cpu_experts
        fed(decoder, one_token)
        computed.append(decoder.expert_work().cpu_experts - before)
        for _ in range(2 * READ_EVERY_STEPS):
            fed(decoder, one_token)
        history.close()
    assert computed[0] > computed[1] == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokens", [1, 3])
def test_each_expert_of_a_step_is_counted_where_it_is(
    share: float, tokens: int, make_decoder: Callable[..., Any], device: str
) -> None:
    """Of equal steps, experts in GPU memory, fetched ones and those of the CPU add up to all that they use."""
    model = make_model("qwen3_moe", num_hidden_layers=2)
    plain = make_decoder(model)
    decoder = make_decoder(
        model,
        expert_memory_bytes=record_bytes(plain) // 2,
        expert_streaming="on",
        streaming_tokens=100,
        fetched_shares=(share, share),
    )
    same = [{"s2": (0, tokens)}]
    fed(plain, same)
    every = plain.expert_work().cpu_experts
    decoder.count_each_step()
    for _ in range(2):  # counts are read one step later
        fed(decoder, same)
    before, steps = decoder.expert_work(), 6
    for _ in range(steps):
        fed(decoder, same)
    work = decoder.expert_work().since(before)
    record = record_bytes(decoder) // int(decoder.statistics()["experts"])
    fetched = work.fetched_bytes / record
    assert work.uses == steps * 2 * tokens * decoder.facts.layers[0].router.chosen
    assert work.gpu_experts + fetched + work.cpu_experts == steps * every
    assert 0 < work.gpu_experts < steps * every and 0 < work.gpu_uses < work.uses
    assert (fetched > 0) == (share * tokens >= 1)  # half of one missing expert is none
    assert (work.cpu_experts > 0) == (share < 1)
    assert decoder.statistics()["expert_moves"] == 0
    assert decoder.statistics()["expert_fetched_bytes"] >= work.fetched_bytes


def test_a_long_step_that_copies_nothing_fetches_nothing(make_decoder: Callable[..., Any]) -> None:
    decoder = make_decoder(
        make_model("qwen3_moe", num_hidden_layers=2),
        expert_streaming="auto",
        streamed_share=0.0,
        streaming_tokens=3,
        fetched_shares=(1.0, 1.0),
    )
    decoder.count_each_step()
    fetched = []
    for tokens in (3, 2, 2):
        before = decoder.expert_work()
        for _ in range(4):
            fed(decoder, [{"s2": (0, tokens)}])
        work = decoder.expert_work().since(before)
        assert (work.cpu_experts > 0) == (tokens == 3)
        fetched.append(work.fetched_bytes)
    assert fetched[0] == 0 < fetched[1]
    assert 4 * fetched[1] == 3 * fetched[2]  # counts are read one step later
