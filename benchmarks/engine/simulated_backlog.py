"""Simulates a backlog beside chats, in virtual time: `python -m benchmarks.engine.simulated_backlog`. It needs no GPU.

Engine, scheduler and probes are the real ones; a SimulatedRunner takes the place of the model. So it answers within
seconds what a rule of the scheduler does to first tokens, to gaps and to the batch.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch

from benchmarks.command import command_line
from benchmarks.engine.simulated_runner import BUS_RATE, CPU_RATE, SimulatedRunner, Vocabulary, between_seconds
from benchmarks.engine.virtual_clock import VirtualClock, virtual_time
from benchmarks.percentiles import percentiles
from benchmarks.results import write
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.batch_loss import BatchLoss, Beside
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.engine.token_selector import HostSelector
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.workers.startup.step_probes import probe_steps

ROWS, STEP_TOKENS, PAGE_TOKENS, MOST_LENGTH = 2048, 8192, 16, 2048
PROMPT_TOKENS, LINE_TOKENS, CHAT_TOKENS = 128, 128, 32
ALONE_SECONDS = 30.0
LINES_A_SECOND = 60  # that wait at the beginning, for each second: more than a batch computes
ARRIVALS = (("even", 0.3), ("even", 1.0), ("even", 2.0), ("even", 4.0), ("Poisson", 2.0))
"""Arrivals of chats, and how many come a second."""


@dataclass(frozen=True, slots=True)
class Way:
    """How chats and a batch share the engine. `share`: see `engine.interactive_share`; 0: no steps overlap.

    `borne`: what is computed beside overlapped steps; None: as BatchLoss says. The rest: see SimulatedRunner.
    """

    name: str
    share: float = EngineConfig().interactive_share
    borne: Beside | None = None
    has_batch: bool = True
    cpu_rate: float = CPU_RATE
    bus_rate: float = BUS_RATE
    longer: float = 1.0


BATCH_ALONE = Way("batch alone")
WAYS = (
    Way("all shared", share=0.0),
    Way("overlapping"),
    Way("prompts alone beside", borne=Beside.PROMPTS),
    Way("nothing beside", borne=Beside.NOTHING),
    Way("chats alone", has_batch=False),
)


class FixedLoss(BatchLoss):
    """A BatchLoss that always says the same."""

    def __init__(self, always: Beside, most: float, clock: Callable[[], float]) -> None:
        super().__init__(most, clock)
        self._always = always

    @property
    def borne(self) -> Beside:
        return self._always


def _engine(way: Way, clock: VirtualClock, rows: int) -> Engine:
    config = EngineConfig(model="simulated", device="cpu", max_num_seqs=rows, max_num_batched_tokens=STEP_TOKENS,
                          interactive_share=way.share, page_size=PAGE_TOKENS)  # fmt: skip
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_TOKENS, dtype=torch.float32)
    pages = rows * (PROMPT_TOKENS + LINE_TOKENS) // PAGE_TOKENS + 2 * rows
    rates = way.cpu_rate, way.bus_rate, way.longer
    runner = SimulatedRunner(clock, *rates, may_overlap=way.share > 0)
    parts = EngineParts(KVCache(layout, pages), runner, HostSelector(Vocabulary().token_bytes))
    options: dict[str, Any] = {"parts": parts, "clock": clock.time, "auto_rows": True}
    return Engine(lambda **_: None, Vocabulary(), layout, config, pages, MOST_LENGTH, **options)


def _add(engine: Engine, name: str, tokens: int, job_class: JobClass) -> None:
    draw = random.Random(name)
    prompt = [draw.randrange(Vocabulary.size - 1) for _ in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.add(name, prompt, sampling, job_class=job_class)


class Chats:
    """Chats that arrive at `rate` a second from `began` on, whether or not others were answered."""

    def __init__(self, rate: float, began: float, *, poisson: bool) -> None:
        self._rate, self._poisson = rate, poisson
        self._draw = random.Random(1)
        self.next = began if rate else inf  # when the next one arrives
        self._since: list[float] = []  # when each one got its last token, or arrived
        self._begun: set[int] = set()
        self._times: dict[bool, list[float]] = {True: [], False: []}  # first tokens, and gaps; milliseconds

    def arrive(self, engine: Engine, now: float) -> None:
        """Add those that have arrived by now."""
        while self.next <= now:
            _add(engine, f"chat-{len(self._since)}", CHAT_TOKENS, JobClass.INTERACTIVE)
            self._since.append(self.next)
            self.next += self._draw.expovariate(self._rate) if self._poisson else 1 / self._rate

    def take(self, output: SequenceOutput, now: float) -> None:
        """Note the tokens of a chat."""
        chat = int(output.request_id.removeprefix("chat-"))
        for _ in output.token_ids:
            self._times[chat not in self._begun].append(1e3 * (now - self._since[chat]))
            self._begun.add(chat)
            self._since[chat] = now

    def latency(self) -> dict[str, Any]:
        """Percentiles of the time to the first token and of gaps, in milliseconds."""
        kinds = {"first_token_": self._times[True], "between_tokens_": self._times[False]}
        figures: dict[str, Any] = {"requests": len(self._since)}
        for prefix, times in kinds.items():
            figures |= percentiles(times, 50, 95, prefix=prefix) if times else {}
        return figures


def simulate(
    way: Way, rate: float, seconds: float, *, poisson: bool = False, rows: int = ROWS, alone: float = ALONE_SECONDS
) -> dict[str, Any]:
    """Simulate so many seconds, with `rate` chats a second. Returns the batch's tokens a second, and Chats.latency.

    Before, the batch runs for `alone` seconds. That fills its rows, and the engine learns what its steps cost.
    """
    clock = VirtualClock()
    with virtual_time(clock, BatchLoss if way.borne is None else partial(FixedLoss, way.borne)):
        engine = _engine(way, clock, rows)
        probe_steps(engine, Vocabulary.size - 1, STEP_TOKENS)
        began = clock.monotonic() + alone
        for line in range(int(LINES_A_SECOND * (alone + seconds)) if way.has_batch else 0):
            _add(engine, f"line-{line}", LINE_TOKENS, JobClass.BATCH)
        chats = Chats(rate, began, poisson=poisson)
        _run(engine, clock, chats, began)
        began = clock.monotonic()
        tokens = _run(engine, clock, chats, began + seconds)
        engine.close()
    return {"batch_tokens_per_second": tokens / (clock.monotonic() - began), **chats.latency()}


def _run(engine: Engine, clock: VirtualClock, chats: Chats, end: float) -> int:
    """Run until `end`. Returns tokens of the batch."""
    tokens = 0
    while (now := clock.monotonic()) < end:
        chats.arrive(engine, now)
        if not engine.has_work:
            clock.sleep(min(chats.next, end) - now)
            continue
        outputs = engine.step()
        clock.sleep(between_seconds(len(outputs)))
        for output in outputs:
            if output.request_id.startswith("line"):
                tokens += len(output.token_ids)
            else:
                chats.take(output, clock.monotonic())
    return tokens


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="virtual ones, of each figure")
    parser.add_argument("--rows", type=int, default=ROWS, help="most sequences that run at once")
    parser.add_argument("--cpu-rate", type=float, default=CPU_RATE, help="of a step beside an overlapped one")
    parser.add_argument("--bus-rate", type=float, default=BUS_RATE, help="of an overlapped step meanwhile")
    parser.add_argument("--longer", type=float, default=1.0, help="an overlapped step alone, by another of its size")
    arguments = parser.parse_args()
    slower = {"cpu_rate": arguments.cpu_rate, "bus_rate": arguments.bus_rate, "longer": arguments.longer}
    run = partial(simulate, seconds=arguments.seconds, rows=arguments.rows)
    alone = run(BATCH_ALONE, 0.0)["batch_tokens_per_second"]
    result: dict[str, Any] = {"format": 1, "seconds": arguments.seconds, "rows": arguments.rows, **slower,
                              "prompt_tokens": PROMPT_TOKENS, "line_tokens": LINE_TOKENS, "chat_tokens": CHAT_TOKENS,
                              "batch_alone_tokens_per_second": alone, "figures": []}  # fmt: skip
    for arrivals, rate in ARRIVALS:
        for way in WAYS:
            figure = run(replace(way, **slower), rate, poisson=arrivals == "Poisson")
            share = figure["batch_tokens_per_second"] / alone
            figure = {"arrivals": arrivals, "rate": rate, "way": way.name, "share_of_alone": share, **figure}
            sys.stderr.write(f"{figure}\n")
            result["figures"].append(figure)
    write(arguments.results / "simulated-backlog.json", result)


if __name__ == "__main__":
    main()
