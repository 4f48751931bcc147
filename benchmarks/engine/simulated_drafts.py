"""Simulates drafts of a small model, in virtual time: `python -m benchmarks.engine.simulated_drafts`. It needs no GPU.

Engine, scheduler, probes and costs are the real ones. The model and the draft model are replaced by runners that say a
text: the draft model says a known part of it. So it shows what drafts may cost where they are often wrong, and what
they gain where they are right.
"""

import random
import sys
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.command import command_line
from benchmarks.engine.simulated_runner import SCATTER, STEPS
from benchmarks.engine.virtual_clock import VirtualClock, virtual_time
from benchmarks.results import write
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.batch import Batch
from ktqueue.engine.batch_loss import BatchLoss
from ktqueue.engine.draft_model import DraftModel, DraftSource
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.outputs import EngineStats
from ktqueue.engine.runner import DeviceTokens
from ktqueue.engine.token_selector import HostSelector
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.workers.startup.step_probes import probe_drafts, probe_steps

Curve = list[tuple[int, float]]
"""Tokens and seconds."""

ON_GPU: Curve = [(1, 0.00139), (2, 0.00191), (4, 0.00248), (8, 0.00353), (16, 0.00422), (32, 0.0058), (64, 0.00698),
                 (128, 0.0097), (256, 0.0134), (512, 0.0188), (2048, 0.0364), (8192, 0.134)]  # fmt: skip
"""Steps of Qwen3-30B-A3B in Q4_K_M with all experts on an H200, by trials-both-h200.json and trials-trace-h200.json."""
PASSES: Curve = [(1, 0.0009), (4, 0.0009), (16, 0.001), (64, 0.0012), (512, 0.004), (2048, 0.01), (8192, 0.03)]
"""Passes of a draft model. Those of a few rows are by drafts-h200-of-a-model.json; longer ones are assumed."""
HOST_SECONDS = 0.00025  # before a step with drafts, and before the one that follows: they are not launched ahead
STEP_TOKENS, PAGE_TOKENS, MOST_LENGTH = 8192, 16, 16384
OWN = 64  # token ids of a row
HOSTS = {"GPU": ON_GPU, "CPU": STEPS}
REQUESTS, ANSWER_TOKENS = 10, 200


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` token ids, of which none ends a text."""

    size: int
    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, _: int) -> bytes:
        return b"a"

    special_token_bytes = token_bytes


class TextRunner:
    """A Runner whose steps take the time of `curve`, and say the text of `token_of`, of which `right` is right."""

    replayed = 0

    def __init__(self, clock: VirtualClock, curve: Curve, vocabulary: int, right: float = 1.0) -> None:
        self._clock, self._curve, self._vocabulary, self._right = clock, curve, vocabulary, right
        self._draw = random.Random(1)

    def execute(self, batch: Batch, tokens: DeviceTokens | None = None) -> torch.Tensor:
        self._clock.sleep(seconds_of(self._curve, batch.input_ids.shape[-1]) * self._draw.uniform(*SCATTER))
        places = batch.position_ids[0, batch.scored] + 1
        rows = batch.input_ids[0, batch.scored] // OWN
        said = [self._said(*pair) for pair in zip(rows.tolist(), places.tolist(), strict=True)]
        logits = torch.zeros(len(said), self._vocabulary)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.int64)] = 1.0
        return logits

    def _said(self, row: int, place: int) -> int:
        is_right = random.Random(f"right {row} {place}").random() < self._right
        return token_of(row, place) ^ (not is_right)

    def prepare(self, batch: Batch) -> bool:
        """See Runner. Nothing is prepared: HOST_SECONDS are what that costs."""
        return False

    def wait(self) -> None:
        """See Runner."""

    def learn(self, seconds: float) -> None:
        """See Runner."""


def seconds_of(curve: Curve, tokens: int) -> float:
    """What so many tokens take: a line between the points of a curve."""
    place = min(max(1, bisect_left(curve, (tokens, 0.0))), len(curve) - 1)
    (low, fast), (high, slow) = curve[place - 1 : place + 1]
    return fast + (slow - fast) * (tokens - low) / (high - low)


def token_of(row: int, place: int) -> int:
    """The token of a row's text in a place, of which no other tells anything."""
    return row * OWN + random.Random(f"{row} {place}").randrange(OWN)


def _engine(clock: VirtualClock, curve: Curve, rows: int, right: float | None) -> Engine:
    """right: of the draft model; None: there is none."""
    vocabulary = Vocabulary(rows * OWN)
    config = EngineConfig(model="simulated", device="cpu", max_num_seqs=rows, max_num_batched_tokens=STEP_TOKENS,
                          page_size=PAGE_TOKENS, enable_prefix_caching=False)  # fmt: skip
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_TOKENS, dtype=torch.float32)
    pages, selector = rows * 2 * MOST_LENGTH // PAGE_TOKENS, HostSelector(vocabulary.token_bytes)
    draft = None
    if right is not None:
        source = DraftSource(lambda **_: None, layout, MOST_LENGTH)
        passes = TextRunner(clock, PASSES, vocabulary.size, right)
        draft = DraftModel(source, passes, KVCache(layout, pages), selector, STEP_TOKENS)
    runner = TextRunner(clock, curve, vocabulary.size)
    parts = EngineParts(KVCache(layout, pages), runner, selector, may_draft=draft is not None, draft_model=draft)
    model = lambda **_: None  # noqa: E731 - it is never called
    return Engine(model, vocabulary, layout, config, pages, MOST_LENGTH, parts=parts, clock=clock.time)


def _seconds(engine: Engine, clock: VirtualClock, rows: int, prompt: int, answer: int) -> float:
    """Seconds of a request of each row, from when all have their first token."""
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        engine.add(str(row), [token_of(row, place) for place in range(prompt)], sampling)
    begun: set[str] = set()
    began, had_drafts = 0.0, False
    while engine.has_work:
        before = engine.stats().drafted_tokens
        outputs = engine.step()
        has_drafts = engine.stats().drafted_tokens > before
        clock.sleep(HOST_SECONDS if has_drafts or had_drafts else 0.0)
        had_drafts = has_drafts
        if len(begun) < rows:
            begun |= {output.request_id for output in outputs if output.token_ids}
            began = clock.monotonic()
    return clock.monotonic() - began


def _run(
    curve: Curve, rows: int, right: float | None, prompt: int, answer: int, requests: int
) -> tuple[list[float], EngineStats]:
    """Seconds of one request of each row after another, and the engine's statistics."""
    clock = VirtualClock()
    with virtual_time(clock, BatchLoss):
        engine = _engine(clock, curve, rows, right)
        probe_steps(engine, OWN, STEP_TOKENS)
        if right is not None:
            probe_drafts(engine, OWN, EngineConfig().max_draft_tokens)
        seconds = [_seconds(engine, clock, rows, prompt, answer) for _ in range(requests)]
        stats = engine.stats()
        engine.close()
    return seconds, stats


def simulate(
    experts: str, rows: int, right: float, prompt: int, answer: int = ANSWER_TOKENS, requests: int = REQUESTS
) -> dict[str, Any]:
    """What drafts gain, of which `right` are right after right ones. experts: a host of HOSTS.

    Each row has one request after another.
    """
    (off, _), (on, stats) = (_run(HOSTS[experts], rows, part, prompt, answer, requests) for part in (None, right))
    return {
        "experts": experts, "rows": rows, "right": right, "prompt_tokens": prompt,
        "first_gain": off[0] / on[0] - 1, "gain": sum(off) / sum(on) - 1, "last_gain": off[-1] / on[-1] - 1,
        "steps": stats.steps, "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens,
    }  # fmt: skip


def main() -> None:
    arguments = command_line(__doc__).parse_args()
    result: dict[str, Any] = {
        "format": 1, "answer_tokens": ANSWER_TOKENS, "requests": REQUESTS, "figures": []
    }  # fmt: skip
    for experts in HOSTS:
        for rows in (1, 4, 16):
            for right in (0.0, 0.6, 0.8, 0.9, 0.97):
                for prompt in (128, 2048):
                    result["figures"].append(simulate(experts, rows, right, prompt))
                    sys.stderr.write(f"{result['figures'][-1]}\n")
    write(arguments.results / "simulated-drafts.json", result)


if __name__ == "__main__":
    main()
