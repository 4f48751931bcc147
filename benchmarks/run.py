"""Takes the figures, writes them to results/ and into the README: `python -m benchmarks.run [engine|system]`."""

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
    parser.add_argument("what", nargs="*", default=["engine", "system"], help="engine, system")
    parser.add_argument("--model", default="demo", help="demo or a .gguf file")
    parser.add_argument("--rows", default="1,4,8,32", help="rows that decode at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=5, help="how often each point is taken")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--llama-python",
        default=os.environ.get("LLAMA_PYTHON"),
        help="a Python with llama-cpp-python, to measure llama.cpp in turns with ours",
    )
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
    for what in given.what:
        sys.stderr.write(f"measuring: {what}\n")
        if what == "engine":
            figures = compare.run(
                model=given.model,
                rows=[int(one) for one in given.rows.split(",")],
                tokens=given.tokens,
                rounds=given.rounds,
                threads=given.threads,
                llama_python=given.llama_python,
            )
        elif what == "system":
            figures = system.run(model=given.model, threads=given.threads, rounds=given.rounds)
        else:
            parser.error(f"there is no benchmark {what!r}")
        write(what, {**figures, "machine": machine.facts(), "command": command})
    tables.write()


def write(what: str, result: dict[str, Any]) -> None:
    """Keep a result; figures with four digits are plenty."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{what}.json").write_text(json.dumps(_short(result), indent=1) + "\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
