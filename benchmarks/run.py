"""Takes the figures, writes them to results/ and into the pages of figures: `python -m benchmarks.run [cpu|system]`."""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.engine import compare
from benchmarks.queue import system
from benchmarks.results import RESULTS, write


def main() -> None:
    """Run the command line."""
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
        "--results", type=Path, default=RESULTS, help="folder of the results; figures/ has their tables"
    )
    arguments = parser.parse_args()
    for what in arguments.what:
        sys.stderr.write(f"measuring: {what}\n")
        if what == "cpu":
            figures = compare.run(
                model=arguments.model,
                rows=[int(one) for one in arguments.rows.split(",")],
                prefill=arguments.prefill,
                tokens=arguments.tokens,
                rounds=arguments.rounds,
                threads=arguments.threads,
                llama_python=arguments.llama_python,
                sampled=arguments.sampled,
                without_ours=arguments.without_ours,
            )
        elif what == "system":
            figures = system.run(model=arguments.model, threads=arguments.threads, rounds=arguments.rounds)
        else:
            parser.error(f"there is no benchmark {what!r}")
        name = f"cpu-{figures['model'].removesuffix('.gguf')}" if what == "cpu" else what
        write(arguments.results / f"{name}.json", figures)


if __name__ == "__main__":
    main()
