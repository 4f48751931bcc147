"""Takes the figures, writes them to results/ and into the pages of figures: `python -m benchmarks.run [cpu|system]`."""

import sys

from benchmarks.command import add_cpu_arguments, command_line, integers
from benchmarks.engine import compare
from benchmarks.queue import system
from benchmarks.results import write
from ktqueue.core.errors import KtqueueError

BENCHMARKS = {"cpu": compare.measure, "system": system.measure}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="*", default=list(BENCHMARKS), help="cpu, system")
    parser.add_argument("--model", default="demo", help="demo or a .gguf file")
    parser.add_argument("--rows", type=integers, default="1,4,8,16,32", help="rows that decode at once")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is read alone; 0: none")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=5, help="how often each point is taken")
    parser.add_argument("--sampled", action="store_true", help="decode with sampling too")
    add_cpu_arguments(parser)
    arguments = parser.parse_args()
    if unknown := [what for what in arguments.what if what not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}")
    for what in arguments.what:
        sys.stderr.write(f"measuring: {what}\n")
        try:
            figures = BENCHMARKS[what](arguments)
        except KtqueueError as error:
            parser.error(error.message)
        name = f"cpu-{figures['model'].removesuffix('.gguf')}" if what == "cpu" else what
        write(arguments.results / f"{name}.json", figures)


if __name__ == "__main__":
    main()
