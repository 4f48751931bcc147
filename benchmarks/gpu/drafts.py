"""What drafts gain on a GPU: `python -m benchmarks.gpu.drafts [--model M] [--expert-gib 0,20] [--results DIR]`.

The engine is built again and again, without drafts and with drafts by lookup, in turns. The text is that of
`benchmarks.engine.drafts`, and its answers must be equal. 0 GiB for experts: all are on the CPU.

With `--draft-model D`, and only with experts in GPU memory, the answers of a draft model are replaced too. It says the
text with a known part of right tokens: what a trained one would reach cannot be known from random weights.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from benchmarks.engine.drafts import ReplacedText, measure
from benchmarks.gpu.loaded_gpu_model import GIB, LoadedGpuModel, gpu_command_line
from benchmarks.results import write
from ktqueue.bench.environment import environment

CACHE_GIB = 4


@dataclass(frozen=True, slots=True)
class Point:
    """A text with a part of repeated tokens, or drafts of a model of which a part is right, for so many rows."""

    repeated: float
    rows: int
    right: float | None = None  # None: drafts by lookup


def numbers(text: str) -> list[float]:
    """The numbers of a list with commas; none of an empty text."""
    return [float(number) for number in text.split(",") if number]


def ways(arguments: argparse.Namespace) -> dict[str, list[Point]]:
    """The points of each way to make drafts."""
    looked_up = [Point(repeated, rows) for repeated in arguments.repeated for rows in arguments.rows]
    looked_up = [point for point in looked_up if point.rows <= arguments.repeated_rows or point.repeated == 0]
    modelled = [Point(0.0, rows, right) for right in arguments.right for rows in arguments.rows]
    return {"lookup": looked_up, **({"model": modelled} if arguments.draft_model and arguments.gib else {})}


def turns(loaded: LoadedGpuModel, text: ReplacedText, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each figure of each turn. Every second turn begins with drafts. Raises SystemExit if drafts change an answer."""
    known: dict[tuple[float, int], Any] = {}
    for turn in range(arguments.turns):
        for drafted, points in ways(arguments).items():
            if not points:
                continue
            for way in ("off", drafted) if turn % 2 == 0 else (drafted, "off"):
                drafts = rebuild(loaded, way, arguments)
                for point in dict.fromkeys(points):
                    text.write(point.repeated)
                    if drafts is not None:
                        drafts.write(point.repeated, right=point.right)
                    before = loaded.engine.stats()
                    speed, answers = measure(loaded.engine, text, point.rows, arguments.tokens)
                    made = loaded.engine.stats().since(before)
                    if known.setdefault((point.repeated, point.rows), answers) != answers:
                        raise SystemExit("drafts changed an answer")
                    yield {
                        "expert_gib": arguments.gib, "drafts": drafted, "repeated": point.repeated,
                        "right": point.right, "rows": point.rows, "on": way != "off", "tokens_per_second": speed,
                        "steps": made.steps, "steps_ahead": made.steps_ahead,
                        "drafted": made.drafted_tokens, "accepted": made.accepted_tokens,
                    }  # fmt: skip


def rebuild(loaded: LoadedGpuModel, way: str, arguments: argparse.Namespace) -> ReplacedText | None:
    """Build the engine with drafts of that way. Returns what its draft model says, if it has one."""
    name = arguments.draft_model if way == "model" else None
    draft, said = loaded.load_draft_model(name) if name else None, None
    if draft is not None:
        assert isinstance(draft.model, nn.Module)
        said = ReplacedText(draft.model, max(arguments.rows), loaded.decoder.device)  # before its passes are captured
    loaded.rebuild(
        draft=draft, speculation=way, draft_model=name, gpu_expert_memory_bytes=arguments.gib * GIB
    )  # fmt: skip
    return said


def compared(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each point: medians without and with drafts, and what drafts gain in the median of the turns."""
    points: dict[tuple[Any, ...], dict[bool, list[dict[str, Any]]]] = {}
    for figure in figures:
        key = tuple(figure[name] for name in ("expert_gib", "drafts", "repeated", "right", "rows"))
        points.setdefault(key, {False: [], True: []})[figure["on"]].append(figure)
    lines = []
    for (gib, drafted, repeated, right, rows), found in points.items():
        off, on = ([figure["tokens_per_second"] for figure in found[way]] for way in (False, True))
        line = {"expert_gib": gib, "drafts": drafted, "repeated": repeated, "right": right, "rows": rows}
        if off and on:
            line |= {"off": median(off), "with": median(on), "off_turns": off, "with_turns": on}
            line["gain"] = median(one / other for one, other in zip(on, off, strict=False)) - 1
            last = found[True][-1]
            line |= {"steps_off": found[False][-1]["steps"]}
            line |= {name: last[name] for name in ("steps", "steps_ahead", "drafted", "accepted")}
            lines.append(line)
    return lines


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16")
    parser.add_argument("--repeated", type=numbers, default="1,0.9,0.5,0", help="parts that repeat earlier tokens")
    parser.add_argument("--repeated-rows", type=int, default=4, help="more rows than these have texts of part 0 only")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--turns", type=int, default=3, help="without and with drafts")
    parser.add_argument("--expert-gib", type=numbers, default="20", help="GPU memory for experts, one after another")
    parser.add_argument("--draft-model", help="a model with the same vocabulary")
    parser.add_argument("--right", type=numbers, default="0.8,0.6", help="parts of its drafts that are right")
    arguments = parser.parse_args()
    loaded = LoadedGpuModel(arguments.model, max(arguments.rows), CACHE_GIB * GIB, gpu_expert_memory_bytes=0)
    text = ReplacedText(loaded.decoder, max(arguments.rows), loaded.decoder.device)
    result: dict[str, Any] = {"format": 2, "model": arguments.model, "environment": environment()}
    result |= {"draft_model": arguments.draft_model, "output_tokens": arguments.tokens, "turns": arguments.turns}
    figures: list[dict[str, Any]] = []
    for gib in arguments.expert_gib:
        arguments.gib = int(gib)
        for figure in turns(loaded, text, arguments):
            sys.stderr.write(f"{figure}\n")
            figures.append(figure)
            write(arguments.results / "drafts.json", {**result, "figures": compared(figures)})  # if interrupted
    loaded.engine.close()


if __name__ == "__main__":
    main()
