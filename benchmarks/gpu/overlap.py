"""Interactive sequences beside a batch on a GPU with experts in host memory: `python -m benchmarks.gpu.overlap`.

The engine runs alone, without Redis. Some interactive rows are always there: when one ends, another arrives. They run
alone first, and then beside a batch of many rows, with steps that overlap those of the batch, and with steps that both
share.
"""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from benchmarks import machine
from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.percentiles import percentiles
from benchmarks.results import GrowingResult
from ktqueue.bench.environment import environment
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine

OUTPUT_TOKENS = 40
BATCH_PROMPT = 16  # short, since decoding is measured


class Load:
    """Adds requests to an engine and counts what they get."""

    def __init__(self, loaded: LoadedGpuModel) -> None:
        self._loaded = loaded
        self._names: Iterator[int] = count()
        self._live: dict[str, float] = {}  # interactive requests, and when they got their last token
        self._first: list[float] = []
        self._between: list[float] = []
        self._asked: set[str] = set()  # without a token yet
        self._batch_tokens = 0

    @property
    def _engine(self) -> Engine:
        return self._loaded.engine

    def add(self, rows: int, tokens: int, job_class: JobClass, prompt: int) -> list[str]:
        """Add requests for `tokens` tokens."""
        names = [str(next(self._names)) for _ in range(rows)]
        for name, ids in zip(names, self._loaded.prompts(rows, prompt, seed=int(names[0])), strict=True):
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            self._engine.add(name, ids, sampling, job_class=job_class)
        return names

    def run(self, rows: int, seconds: float) -> dict[str, Any]:
        """Keep so many interactive rows, for some seconds."""
        self._first, self._between, self._batch_tokens = [], [], 0
        for _ in range(rows):
            self._ask()
        began = time.monotonic()
        while time.monotonic() < began + seconds and self._engine.has_work:
            self._step()
        took = time.monotonic() - began
        for name in list(self._live):
            self._engine.abort(name)
        self._live.clear()
        return {
            "rows": rows,
            "batch_tokens_per_second": self._batch_tokens / took,
            "interactive_tokens_per_second": (len(self._first) + len(self._between)) / took,
            **_milliseconds(self._first, "first_token_"),
            **_milliseconds(self._between, "between_tokens_"),
            "dram_gb_s": machine.bandwidth(),
        }

    def _ask(self) -> None:
        (name,) = self.add(1, OUTPUT_TOKENS, JobClass.INTERACTIVE, PROMPT_TOKENS)
        self._asked.add(name)
        self._live[name] = time.monotonic()

    def _step(self) -> None:
        outputs, now = self._engine.step(), time.monotonic()
        for output in outputs:
            if output.request_id not in self._live:
                self._batch_tokens += len(output.token_ids)
                continue
            if output.token_ids:
                times = self._first if output.request_id in self._asked else self._between
                times.append(now - self._live[output.request_id])
                self._asked.discard(output.request_id)
                self._live[output.request_id] = now
            if output.request_done:
                del self._live[output.request_id]
                self._ask()


def _milliseconds(seconds: list[float], prefix: str) -> dict[str, float]:
    return percentiles([1e3 * value for value in seconds], 50, 95, prefix=prefix) if seconds else {}


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,2,4,8")
    parser.add_argument("--batch", type=int, default=1024, help="rows of the batch")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each figure")
    parser.add_argument("--cache-gib", type=int, default=40)
    arguments = parser.parse_args()
    rows = arguments.batch + max(arguments.rows)
    loaded = LoadedGpuModel(arguments.model, rows, arguments.cache_gib * GIB)
    result = GrowingResult(
        arguments.results / "overlap.json",
        model=arguments.model,
        environment=environment(),
        batch=arguments.batch,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )

    def measure(load: Load, way: str, numbers: list[int]) -> None:
        for number in numbers:
            result.add({"way": way, **load.run(number, arguments.seconds)})

    def with_batch() -> Load:
        load = Load(loaded)
        load.add(arguments.batch, 4096, JobClass.BATCH, BATCH_PROMPT)
        load.run(0, 2 * arguments.seconds)  # computes the prompts
        return load

    measure(Load(loaded), "alone", arguments.rows)
    measure(with_batch(), "overlapping", [*arguments.rows, 0])
    loaded.rebuild(interactive_share=0.0)
    measure(with_batch(), "shared", arguments.rows)
    loaded.engine.close()


if __name__ == "__main__":
    main()
