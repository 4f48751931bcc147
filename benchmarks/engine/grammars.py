"""What grammars cost a step: `python -m benchmarks.engine.grammars [--model M] [--tokenizer T] [--results DIR]`.

Rows decode together, in turns without a grammar, with one that allows any text, and with different JSON schemas. With
any text the tokens are the same as without, so it shows the cost alone; documents of a schema have other tokens, which
use other experts. Documents never end, so that all rows run. Then a row gets a schema that no row has had, while the
others decode: how long their steps take meanwhile. A step with a grammar may add several tokens to a row, because
forced tokens need no step.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.results import write
from ktqueue.answers.grammar import GrammarCompiler, Matcher
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.workers.startup.build import Built, build

PROMPT_TOKENS = 24
ENDLESS = 100_000  # items of a document
ANY = r"start: /(.|\n)*/"
MODES = WITHOUT, ANY_TEXT, SCHEMAS = ("without", "any text", "schemas")
COLUMNS = {
    "model": "{model}", "vocabulary": "{vocabulary:,}", "rows": "{rows}", "sampling": "{sampling}",
    "tok/s without": "{without:.0f}", "any text": "{any_text:.2f}", "schemas": "{schemas:.2f}",
    "step without, ms": "{step_without:.2f}", "step, any text": "{step_any_text:.2f}",
    "step, schemas": "{step_schemas:.2f}",
    "longest step while a schema is compiled, ms": "{longest_step:.1f}", "compiled in, ms": "{compiled:.1f}",
}  # fmt: skip


def schemas() -> list[Any]:
    """Schemas of endless documents: texts, numbers, records, choices, patterns, and trees."""
    text = {"type": "string"}
    record = {
        "type": "object",
        "properties": {"name": text, "age": {"type": "integer"}, "kind": {"enum": ["fox", "crow", "hen"]}},
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    items: list[Any] = [
        {"type": "string", "minLength": 200}, {"type": "number"}, record, {"enum": [f"choice {i}" for i in range(50)]},
        {"type": "string", "pattern": "^[a-z ]{40,400}$"}, {"type": "array", "items": text, "minItems": 4},
        {"anyOf": [text, {"type": "null"}, record]}, {"type": "object"},
    ]  # fmt: skip
    return [{"type": "array", "items": item, "minItems": ENDLESS} for item in items]


def large(seed: int) -> str:
    """The grammar of a large schema that nobody has sent before."""
    properties = {f"property_{seed}_{i}": {"type": "string", "pattern": f"^[a-z]{{{1 + i % 9},}}$"} for i in range(300)}
    return lark_of_schema({"type": "object", "properties": properties}, "schema")


class Rows:
    """Rows that decode together on one engine."""

    def __init__(self, built: Built, compiler: GrammarCompiler, rows: int, sampling: dict[str, Any]) -> None:
        self._engine: Engine = built.engine
        self._compiler = compiler
        self._vocabulary = built.tokenizer.size
        self._rows = rows
        self._sampling = sampling
        self._grammars = [lark_of_schema(schema, "schema") for schema in schemas()]

    def start(self, grammars: str, seed: int) -> None:
        """Read the prompts, and run a few steps. `grammars`: one of MODES."""
        draw = random.Random(seed)
        for row in range(self._rows):
            prompt = [draw.randrange(256) for _ in range(PROMPT_TOKENS)]
            params = SamplingParams(seed=draw.getrandbits(40), max_tokens=3000, ignore_eos=True, **self._sampling)
            self._engine.add(str(row), prompt, params, matcher=self._matcher(row, grammars))
        for _ in range(8):
            self._engine.step(lambda: True)

    def steps(self, count: int) -> tuple[list[float], int]:
        """The seconds of each of `count` steps, and the number of tokens that they gave."""
        times, tokens = [], 0
        for _ in range(count):
            began = time.perf_counter()
            outputs = self._engine.step(lambda: True)
            times.append(time.perf_counter() - began)
            tokens += sum(len(output.token_ids) for output in outputs)
            assert not any(output.error for output in outputs), outputs
        return times, tokens

    def while_compiling(self, grammar: str) -> tuple[float, float]:
        """The longest step while a thread compiles a grammar, and the seconds that this took."""
        ended: list[float] = []

        def work() -> None:
            began = time.perf_counter()
            self._compiler.compile(grammar)
            ended.append(time.perf_counter() - began)

        thread = threading.Thread(target=work)
        thread.start()
        times: list[float] = []
        while not ended:
            times += self.steps(1)[0]
        thread.join()
        return max(times), ended[0]

    def stop(self) -> None:
        """Drop all rows."""
        for row in range(self._rows):
            self._engine.abort(str(row))
        while self._engine.has_work:
            self._engine.step()

    def _matcher(self, row: int, grammars: str) -> Matcher | None:
        if grammars == WITHOUT:
            return None
        return self._compiler.compile(ANY if grammars == ANY_TEXT else self._grammars[row % len(self._grammars)])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds, in turns."""
    config = EngineConfig(
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        device=arguments.device,
        max_num_seqs=arguments.rows,
        max_model_len=4096,
        threads=arguments.threads,
    )
    built = build(config)
    compiler = GrammarCompiler(built.tokenizer, built.tokenizer.encode_plain)
    figures: list[dict[str, Any]] = []
    for name, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_p": 0.95})):
        rows = Rows(built, compiler, arguments.rows, sampling)
        speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        longest, compiled = [], []
        for turn in range(arguments.rounds):
            for mode in MODES:
                rows.start(mode, seed=turn)
                taken, tokens = rows.steps(arguments.steps)
                speeds[mode].append(tokens / sum(taken))
                times[mode].append(median(taken))
                if mode == SCHEMAS:
                    most, seconds = rows.while_compiling(large(1000 * turn + len(figures)))
                    longest.append(most)
                    compiled.append(seconds)
                rows.stop()
        figures.append(
            {
                "model": Path(arguments.model).stem,
                "vocabulary": built.tokenizer.size,
                "rows": arguments.rows,
                "sampling": name,
                "without": median(speeds[WITHOUT]),
                "any_text": median(b / a for a, b in zip(speeds[WITHOUT], speeds[ANY_TEXT], strict=True)),
                "schemas": median(b / a for a, b in zip(speeds[WITHOUT], speeds[SCHEMAS], strict=True)),
                "step_without": 1e3 * median(times[WITHOUT]),
                "step_any_text": 1e3 * median(times[ANY_TEXT]),
                "step_schemas": 1e3 * median(times[SCHEMAS]),
                "longest_step": 1e3 * median(longest),
                "compiled": 1e3 * median(compiled),
                "load_average": machine.load_average(),
            }
        )
    built.engine.close()
    text = (
        f"{arguments.rows} rows decode together, in turns without a grammar, with any text and with "
        f"{len(schemas())} JSON schemas; "
        f"medians of {arguments.rounds} rounds of {arguments.steps} steps. Forced tokens take no step."
    )
    section = {"title": f"Grammars, {Path(arguments.model).stem}", "text": text, "columns": COLUMNS, "words": 1}
    return {"section": section, "figures": figures}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokenizer", help="a file or folder with the tokenizer, if it is not the model's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    result = measure(arguments)
    for figure in result["figures"]:
        print(json.dumps(figure))  # noqa: T201
    write(arguments.results / f"grammars-{Path(arguments.model).stem}-{arguments.device}.json", result)


if __name__ == "__main__":
    main()
