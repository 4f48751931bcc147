"""Parts of a step that take turns: who waits when, and what comes of it."""

from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.turns import Turns, take_turns
from ktqueue.operators.step import StepContext


def test_each_goes_on_to_where_it_would_wait():
    told: list[str] = []

    def work(name: str, waits: int) -> Turns[str]:
        for i in range(waits):
            told.append(f"{name}{i}")
            yield
        return name.upper()

    assert take_turns([work("a", 3), work("b", 1), work("c", 0), work("d", 2)]) == ["A", "B", "C", "D"]
    assert told == ["a0", "b0", "d0", "a1", "d1", "a2"]
    assert take_turns([]) == []


def halves(decoder: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the cache's steps come in two parts, the first of one row."""
    planned = cache._planned

    def cut(host: StepContext, live_tokens: int | None) -> StepContext:
        parts = []
        for rows in (slice(0, 1), slice(1, None)):
            contexts = host.context_lengths[rows]
            starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
            part = StepContext(starts, contexts, host.page_table[rows], host.slot_mapping[rows], host.kv)
            plan = cache._planner.decode_plan(len(contexts), host.page_table.shape[1])
            plan.update(part)
            arrays = (one.to(cache._device) for one in (starts, contexts, part.page_table, part.slot_mapping))
            live = torch.tensor([len(contexts)], dtype=torch.int32, device=cache._device)
            parts.append(StepContext(*arrays, cache.kv, plan, live))
        whole = planned(host, len(host.slot_mapping))
        return StepContext(
            whole.query_starts, whole.context_lengths, whole.page_table, whole.slot_mapping, whole.kv,
            live_tokens=whole.live_tokens, parts=tuple(parts),
        )  # fmt: skip

    monkeypatch.setattr(cache, "_planned", cut)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3_moe", 3),
        ("qwen2_moe", 2),
        ("qwen3_moe with dense layers", 4),
        ("qwen2_moe with dense layers", 2),  # the first layer
        ("qwen2_moe with windows", 3),
        ("deepseek_v3", 3),
    ],
)
def test_parts_compute_what_the_whole_does(family, layers, make_decoder, device, monkeypatch):
    decoder = make_decoder(make_model(family, num_hidden_layers=layers))
    assert decoder.takes_turns
    whole, parts = (Cache(decoder, device=device, planner=make_planner_for) for _ in range(2))
    with torch.inference_mode():
        for cache in (whole, parts):
            cache.step({name: ids[:-2] for name, ids in SEQUENCES.items() if len(ids) > 2})
        halves(decoder, parts, monkeypatch)
        for at in (-2, -1):
            rows = {name: [ids[at]] for name, ids in SEQUENCES.items() if len(ids) > 2}
            torch.testing.assert_close(parts.step(rows), whole.step(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fetched", [0.0, 1.0])
def test_parts_find_experts_as_the_whole_does(fetched, make_decoder, device, monkeypatch):
    """On the GPU or coming there, and what they use is counted."""
    model = make_model("qwen3_moe", num_hidden_layers=2)
    half = sum(layer.record.bytes * layer.experts for layer in make_decoder(model)._routed) // 2
    decoder = make_decoder(model, expert_memory_bytes=half, expert_streaming="on", fetched_share=fetched)
    counts = decoder._experts._placement.counts
    cache = Cache(decoder, device=device, planner=make_planner_for)
    with torch.inference_mode():
        cache.step({"a": [3, 4, 5], "b": [9], "c": [8, 2]})
        halves(decoder, cache, monkeypatch)
        uses, on_cpu = int(counts.sum()), decoder.experts_used
        cache.step({"a": [6], "b": [7], "c": [5]})
    assert int(counts.sum()) - uses == 3 * 2 * 2  # tokens, experts of each, layers
    assert (decoder.experts_used > on_cpu) == (fetched == 0.0)


def test_a_part_that_fails_leaves_nothing_behind(make_decoder, device, monkeypatch):
    """Whichever part it is, and wherever the others stand."""
    decoder = make_decoder(make_model("qwen3_moe", num_hidden_layers=2))
    whole, parts = (Cache(decoder, device=device, planner=make_planner_for) for _ in range(2))
    first, then = {"a": [3, 4, 5], "b": [9]}, {"a": [6], "b": [7]}
    settle = Handoff.settle
    with torch.inference_mode():
        whole.step(first)
        expected = whole.step(then)
        parts.step(first)
        halves(decoder, parts, monkeypatch)
        for failing in ((0, 0), (0, 1), (1, 0), (1, 1)):

            def fail(self: Handoff, layer: int, tokens: int, *, slot: int = 0, at: Any = failing) -> None:
                if (layer, slot) == at:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                settle(self, layer, tokens, slot=slot)

            with monkeypatch.context() as context:
                context.setattr(Handoff, "settle", fail)
                with pytest.raises(torch.OutOfMemoryError):
                    parts.step(then)
            decoder.after_step()
            parts.fed |= {name: parts.fed[name] - 1 for name in then}
            torch.testing.assert_close(parts.step(then), expected, atol=1e-5, rtol=1e-5)
            parts.fed |= {name: parts.fed[name] - 1 for name in then}


def test_the_cpu_has_always_a_part_to_work_on(make_decoder, device, monkeypatch):
    """A layer of one part is asked for before the stream waits for the other, and each has a slot of its own."""
    told: list[tuple[str, int, int]] = []
    request, settle = Handoff.request, Handoff.settle

    def note(name: str, call: Any) -> Any:
        def noted(self: Handoff, layer: int, tokens: int, *, slot: int = 0, **options: Any) -> None:
            told.append((name, layer, slot))
            assert not options.get("predicts") and not options.get("defers")
            call(self, layer, tokens, slot=slot, **options)

        return noted

    decoder = make_decoder(make_model("qwen3_moe", num_hidden_layers=2))
    cache = Cache(decoder, device=device, planner=make_planner_for)
    with torch.inference_mode():
        cache.step({"a": [3, 4, 5], "b": [9]})
        halves(decoder, cache, monkeypatch)
        monkeypatch.setattr(Handoff, "request", note("request", request))
        monkeypatch.setattr(Handoff, "settle", note("settle", settle))
        cache.step({"a": [6], "b": [7]})
    assert told == [
        ("request", 0, 0),
        ("request", 0, 1),
        ("settle", 0, 0),
        ("request", 1, 0),
        ("settle", 0, 1),
        ("request", 1, 1),
        ("settle", 1, 0),
        ("settle", 1, 1),
    ]


def test_who_takes_no_turns(make_decoder):
    model = make_model("qwen3_moe", num_hidden_layers=2)
    assert not make_decoder(model, deferred_experts=1).takes_turns
    assert not make_decoder(model, expert_memory_bytes=1 << 30).takes_turns, "the CPU has no experts"
