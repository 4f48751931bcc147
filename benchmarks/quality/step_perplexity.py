"""Perplexity on a GPU by the shape of steps, beside the CPU's engine in float32.

    python -m benchmarks.quality.step_perplexity TEXT [--model M] [--device cuda]

The number of tokens in a step decides which kernels compute it: few tokens are rounded to int8, and many are multiplied
by weights in bfloat16. 1x128: steps of one row with 128 tokens, 16x1: decode steps of 16 rows. All experts are in GPU
memory. Each shape runs with keys and values as computed, and in float8. TEXT may be an .xz file.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.quality import logits
from benchmarks.quality.scored_texts import Sums, Text
from benchmarks.results import write
from ktqueue.core.config import EngineConfig
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import native
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext
from ktqueue.workers.startup.gpu_memory import planner_of, sum_exactly

EXACT = str(Path(__file__).parents[2] / "rules" / "exact.yaml")
PAGE = 16
FLOAT8 = torch.float8_e4m3fn
COMPUTED, ROUNDED = "as computed", "float8"
ON_CPU, ON_CPU_ROUNDED = "CPU, float32", "CPU, activations in int8"


class Shape(NamedTuple):
    """Rows of a step, and the tokens of each."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


@dataclass(slots=True)
class OnGpu:
    """A model on a device, as a worker loads it, with a planner of attention for each kind of cache."""

    name: str
    device: str
    most_tokens: int
    decoder: GpuDecoder = field(init=False)
    caches: dict[str, tuple[KVLayout, AttentionPlanner]] = field(init=False)

    def __post_init__(self) -> None:
        sum_exactly()
        model = load_model(self.name, device=self.device, dtype=torch.bfloat16)
        if not isinstance(model.module, GpuDecoder):
            raise SystemExit(f"GpuDecoder is measured, not {type(model.module).__name__}")
        self.decoder = model.module
        config = EngineConfig(model=self.name, device=self.device, page_size=PAGE)
        layouts = {COMPUTED: model.kv_layout(PAGE), ROUNDED: model.kv_layout(PAGE, FLOAT8)}
        self.caches = {way: (layout, planner_of(model, layout, config)) for way, layout in layouts.items()}
        self.decoder.prepare_device(GpuSettings(max_tokens=self.most_tokens, expert_memory_bytes=1 << 40))

    def pairs(self, shape: Shape) -> float:
        """Pairs of a token and an expert that an expert has on average."""
        router = next(layer.router for layer in self.decoder.facts.layers if layer.router is not None)
        return shape.rows * shape.tokens * router.chosen / router.experts

    @torch.inference_mode()
    def steps(self, windows: torch.Tensor, shape: Shape, way: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Run windows [rows, tokens] int64. Yields the tokens of each step and their log probabilities, [rows, tokens
        of the step, vocabulary]."""
        rows, count = windows.shape
        layout, planner = self.caches[way]
        pages = -(-count // PAGE)
        kv = KVCache(layout, rows * pages, self.device)
        table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        slots = torch.arange(rows)[:, None] * pages * PAGE + torch.arange(count)[None]
        for start in range(0, count, shape.tokens):
            part = slice(start, min(count, start + shape.tokens))
            length = part.stop - part.start
            host: dict[str, Any] = {
                "query_starts": torch.arange(rows + 1, dtype=torch.int32) * length,
                "context_lengths": torch.full((rows,), part.stop, dtype=torch.int32),
                "page_table": table,
                "slot_mapping": slots[:, part].reshape(-1),
            }
            plan = planner.plan(StepContext(kv=kv, **host))
            arrays = {name: array.to(self.device) for name, array in host.items()}
            output = self.decoder(
                input_ids=windows[:, part].reshape(1, -1).to(self.device),
                position_ids=torch.arange(part.start, part.stop, device=self.device).repeat(rows)[None],
                logits_to_keep=torch.arange(rows * length, device=self.device),
                step=StepContext(kv=kv, attention=plan, **arrays),
            )
            yield part, torch.log_softmax(output.logits[0].float(), -1).view(rows, length, -1)


def compare(
    name: str, device: str, windows: torch.Tensor, shapes: list[Shape], threads: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the figures of all ways after each part of the windows [windows, tokens] int64."""
    exact, rounded = (logits.ours(Path(name), threads, rules) for rules in (EXACT, None))
    gpu = OnGpu(name, device, max(shape.rows * shape.tokens for shape in shapes))
    sums: dict[tuple[str, str, float | None], Sums] = {}
    for some in torch.split(windows, max(shape.rows for shape in shapes)):
        expected = torch.stack([_scores(exact, ids) for ids in some]).to(device)
        on_cpu = torch.stack([_scores(rounded, ids) for ids in some]).to(device)
        targets = some[:, 1:].to(device)
        for way, found in ((ON_CPU, expected), (ON_CPU_ROUNDED, on_cpu)):
            total = sums.setdefault((way, COMPUTED, None), Sums())
            for one, true, ids in zip(found, expected, targets, strict=True):
                total.add(one[:-1], true[:-1], ids)
        for shape in shapes:
            for way in gpu.caches:
                total = sums.setdefault((str(shape), way, gpu.pairs(shape)), Sums())
                for first in range(0, len(some), shape.rows):
                    rows = slice(first, first + shape.rows)
                    for part, found in gpu.steps(some[rows], shape, way):
                        ids = targets[rows, part]  # without one for the last token
                        kept = slice(part.start, part.start + ids.shape[1])
                        total.add(
                            found[:, : ids.shape[1]].flatten(0, 1), expected[rows, kept].flatten(0, 1), ids.flatten()
                        )
        usual = sums[ON_CPU, COMPUTED, None].perplexity
        yield [
            {"steps": steps, "cache": cache, **({"pairs": pairs} if pairs else {}), **total.figure(usual)}
            for (steps, cache, pairs), total in sums.items()
        ]


def _scores(source: logits.Source, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(source(ids.tolist())), -1)


def shapes_of(text: str) -> list[Shape]:
    """Shapes of a list with commas, such as 1x128,16x1."""
    return [Shape(*map(int, part.split("x"))) for part in text.split(",")]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=shapes_of, default="1x512,1x128,1x32,16x1,64x1", help="rows x tokens of steps")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--window", type=int, default=512, help="tokens; all but the first are scored")
    arguments = parser.parse_args()
    threads = native.set_threads()
    count, window = arguments.windows, arguments.window
    scored = Text.read(arguments.text)
    windows = torch.tensor(scored.windows(load_tokenizer(arguments.model).encode, count, window))
    columns = {
        "steps": "{steps}",
        "keys and values": "{cache}",
        "pairs of an expert": "{pairs:g}",
        "perplexity": "{perplexity:.3f}",
        "against the CPU in float32": "{change:+.3f}%",
        "+-": "{error:.3f}%",
        "KL": "{kl:.2g}",
        "same token": "{same:.1f}%",
    }
    done = 0
    for figures in compare(arguments.model, arguments.device, windows, arguments.shapes, threads):
        done = min(count, done + max(shape.rows for shape in arguments.shapes))
        facts = machine.facts()
        text = (
            f"{done} windows of {window} tokens of {scored} from its beginning; all but a window's first token "
            "scored. 1x128: steps of one row with 128 tokens; 16x1: decode steps of 16 rows. Pairs: of a token and an "
            "expert. +-: the standard error. Dense weights and activations are bfloat16, all experts in GPU memory. KL "
            "divergence and likeliest token: against the CPU in float32. "
            f"{arguments.device}; commit {facts['commit']}, {facts['taken']}."
        )
        title = f"Perplexity by the shape of steps: {arguments.model}"
        section = {"title": title, "text": text, "words": 2, "columns": columns}
        sys.stderr.write(f"{done} windows: {figures}\n")
        path = arguments.results / f"step-perplexity-{arguments.model.replace(':', '-')}-{arguments.device}.json"
        write(path, {"section": section, "figures": figures}, digits=6)


if __name__ == "__main__":
    main()
