"""Takes the figures, writes them to results/ and into the README: `python -m benchmarks.run [cpu|system]`."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import compare, machine, system, tables

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cpu", "system"], help="cpu, system")
    parser.add_argument("--model", default="demo", help="demo or a .gguf file")
    parser.add_argument("--rows", default="1,4,8,16,32", help="rows that decode at once")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is read alone; 0: none")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=5, help="how often each point is taken")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--llama-python",
        default=os.environ.get("LLAMA_PYTHON"),
        help="a Python with llama-cpp-python, to measure llama.cpp in turns with ours",
    )
    parser.add_argument("--sampled", action="store_true", help="decode with sampling too")
    parser.add_argument("--without-ours", action="store_true", help="llama.cpp alone")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results; the README has its tables"
    )
    given = parser.parse_args()
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "benchmarks.run", *words])
    for what in given.what:
        sys.stderr.write(f"measuring: {what}\n")
        if what == "cpu":
            figures = compare.run(
                model=given.model,
                rows=[int(one) for one in given.rows.split(",")],
                prefill=given.prefill,
                tokens=given.tokens,
                rounds=given.rounds,
                threads=given.threads,
                llama_python=given.llama_python,
                sampled=given.sampled,
                without_ours=given.without_ours,
            )
        elif what == "system":
            figures = system.run(model=given.model, threads=given.threads, rounds=given.rounds)
        else:
            parser.error(f"there is no benchmark {what!r}")
        name = f"cpu-{figures['model'].removesuffix('.gguf')}" if what == "cpu" else what
        write(given.results / f"{name}.json", {**figures, "machine": machine.facts(), "command": command})
    if given.results == RESULTS:
        tables.write()


def write(path: Path, result: dict[str, Any]) -> None:
    """Keep a result; figures with four digits are plenty."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_short(result), indent=1) + "\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
