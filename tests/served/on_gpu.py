"""Checks every family of GpuDecoder on a real GPU: `python -m tests.served.on_gpu --processes 12`.

Each answers the requests of `make models` in float32 and in bfloat16, with all routed experts on the CPU, with half of
them in GPU memory, and with all of them there; a model without experts once a type. In float32 every token must be
transformers' own or a tie. In bfloat16 both engines are compared with float32 arithmetic on the same rounded weights:
transformers reads our tokens and would have chosen others at some of them.

Exits with 1 if a token of float32 differs, or if ours differ in bfloat16 at more than twice as many tokens as those of
transformers. Writes `families-on-gpu.json`, which `make models ARGS=--page` shows.
"""

import multiprocessing
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.results import write
from ktqueue.bench.environment import installed_version
from tests.served import page
from tests.served.equality import NEW_TOKENS, TIE, compare, gpu_answers, prompts_of_families, transformers_scores
from tests.served.families import served_families

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLACES = {"CPU": 0.0, "both": 0.5, "GPU": 1.0}
"""The share of the routed experts that is in GPU memory, by the page's word for it."""
DENSE = {"-": 0.0}
MORE = 2.0  # times transformers' different tokens of bfloat16
FEW = 8  # different tokens that say nothing, since transformers' kernels differ in as many from each other


def check(class_name: str, device: str) -> list[dict[str, Any]]:
    """Return one row for each type and place of a family, in a process of its own."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, rows = prompts_of_families(), []
    family = next(served for served in served_families() if served.class_name == class_name)
    for name, dtype in TYPES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            family.save(folder)
            if dtype != torch.float32:
                _round(folder, dtype)
            scores = transformers_scores(folder)
            routed = "experts" in " ".join(key for key, _ in _parameters(folder))
            for place, share in (PLACES if routed else DENSE).items():
                row: dict[str, Any] = {"class": class_name, "dtype": name, "experts": place}
                try:
                    answers, _ = gpu_answers(folder, prompts, device, dtype, share)
                    row |= compare(prompts, answers, scores)
                    if dtype != torch.float32:
                        theirs = transformers_scores(folder, dtype, device)
                        row["transformers"] = _other_choices(prompts, answers, scores, theirs)
                except Exception as error:  # the others shall still be checked
                    traceback.print_exc()
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
    return rows


def _parameters(folder: Path) -> list[tuple[str, torch.nn.Parameter]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return list(transformers.AutoModelForCausalLM.from_config(config).named_parameters())  # type: ignore[no-untyped-call]


def _round(folder: Path, dtype: torch.dtype) -> None:
    """Save the weights of a folder in another type."""
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)


def _other_choices(prompts: Any, answers: Any, scores: Any, theirs: Any) -> dict[str, Any]:
    """Tokens at which transformers, reading our tokens, chooses those of float32, and the worst gap of its choices."""
    equal, worst = 0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, first = [*prompt, *answer[:-1]], len(prompt) - 1
        logits = scores(ids)[first:].astype(np.float64)
        chosen = theirs(ids)[first:].argmax(-1)
        equal += int((chosen == logits.argmax(-1)).sum())
        worst = max(worst, float((logits.max(-1) - logits[np.arange(len(answer)), chosen]).max()))
    return {"equal": equal, "worst_gap": worst}


def fails(row: dict[str, Any]) -> bool:
    """Whether a row shows a fault."""
    if "error" in row:
        return True
    different = int(row["tokens"] - row["equal"] - row["ties"])
    if "transformers" not in row:
        return different > 0
    return different > max(FEW, MORE * int(row["tokens"] - row["transformers"]["equal"]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("families", nargs="*", help="model types; all if none is named")
    parser.add_argument("--processes", type=int, default=4, help="families at a time; they share the GPU")
    parser.add_argument("--device", default="cuda", help="cpu: to try this program")
    arguments = parser.parse_args()
    served = [family for family in served_families() if not family.by_modules]
    if unknown := {*arguments.families} - {family.model_type for family in served}:
        parser.error(f"not served: {', '.join(sorted(unknown))}")
    chosen = [family for family in served if not arguments.families or family.model_type in arguments.families]
    commit, found = machine.facts()["commit"], {}
    spawn = multiprocessing.get_context("spawn")
    versions = {name: installed_version(name) for name in ("triton", "flashinfer-python")}
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        running = {pool.submit(check, family.class_name, arguments.device): family for family in chosen}
        for done in as_completed(running):
            family = running[done]
            found[family.class_name] = [
                row | {"model_type": family.model_type, "commit": commit} for row in done.result()
            ]
            print(family.model_type, "fails" if any(map(fails, found[family.class_name])) else "equal")  # noqa: T201
            figures = [row for other in served for row in found.get(other.class_name, [])]
            name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
            device = {"gpu": name, "cuda": torch.version.cuda, **versions}
            write(
                arguments.results / page.ON_GPU.name,
                {"tie": TIE, "new_tokens": NEW_TOKENS, "device": device, "figures": figures},
            )
    if any(fails(row) for rows in found.values() for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
