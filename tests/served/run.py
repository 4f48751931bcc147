"""Checks every family that is served, and writes docs/reference/models.md: `make models`.

A tiny random model of each family is saved as a folder, and as a GGUF file if we write its architecture. Our engines
answer 64 greedy requests, in chunks, with preemption and shared prefixes. Every token is compared with transformers,
and with llama.cpp if a Python that has llama-cpp-python is named. Exits with 1 if a token differs and does not tie.

    make models ARGS="qwen3_moe --llama-python PYTHON"    # some model types; the results of others are kept
    make models ARGS=--page                               # only the page
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.quality import logits
from benchmarks.results import write
from ktqueue.loading.convert import convert
from tests.served import page
from tests.served.equality import (
    NEW_TOKENS,
    TIE,
    compare,
    cpu_answers,
    gpu_answers,
    prompts_of_families,
    relative_difference,
    transformers_scores,
)
from tests.served.families import ServedFamily, served_families

COMPARED_LOGITS = 8  # prompts
ERROR_TOKENS = 30  # of the shortest prompt whose errors are taken
THREADS = 1  # of each process: more would wait for each other longer than these models take


def check(family: ServedFamily, folder: Path, llama_python: str | None, device: str) -> dict[str, Any]:
    """Return what the page says about a family, but for the commit. `folder` is empty."""
    prompts = prompts_of_families()
    model, file = folder / "model", folder / "model.gguf"
    family.save(model)
    scores = transformers_scores(model)
    row: dict[str, Any] = {
        "class": family.class_name,
        "model_type": family.model_type,
        "by_modules": family.by_modules,
        "architecture": family.file and family.file.architecture,
    }

    def with_counts(answers: list[list[int]], ran: dict[str, Any]) -> dict[str, Any]:
        return {**ran, **compare(prompts, answers, scores)}

    row["folder"] = with_counts(*cpu_answers(model, prompts))
    if not family.by_modules:
        row["gpu"] = with_counts(*gpu_answers(model, prompts, device)) | {"device": device}
    if family.file is not None:
        if family.has_file_sizes:
            model = folder / "for file"
            family.save(model, for_file=True)
            scores = transformers_scores(model)
        convert(model, file, experts="f32", dense="f32")
        answers, ran = cpu_answers(file, prompts)
        row["gguf"] = with_counts(answers, ran)
        if llama_python and family.model_type not in page.UNLIKE_LLAMA:
            row["llama"] = _llama(llama_python, file, prompts, answers)
            if row["llama"]:
                quantised = folder / "quantised.gguf"
                convert(model, quantised, experts=page.QUANTISED, dense=page.QUANTISED)
                row["llama"]["quantised"] = _errors(llama_python, quantised, prompts)
    return row


def _llama(python: str, file: Path, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any] | None:
    """Compare with llama.cpp. Returns None if it cannot load the file."""
    try:
        with logits.llama(python, file, THREADS, exact=True) as theirs:
            found = compare(prompts, answers, theirs)
            windows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)][:COMPARED_LOGITS]
            ours = logits.ours(file, THREADS, "exact")
            return {
                **found,
                "relative_difference": relative_difference(ours, theirs, windows),
                "version": _version(python),
            }
    except RuntimeError as error:
        logging.warning("%s", error)
        return None


def _errors(python: str, file: Path, prompts: list[list[int]]) -> dict[str, float]:
    """The errors of a quantised file's logits, ours and llama.cpp's, both as they round activations: the median of the
    tokens, of the error's norm relative to that of the centred logits without rounding."""
    windows = [prompt for prompt in prompts if len(prompt) >= ERROR_TOKENS][:COMPARED_LOGITS]
    exact, ours = logits.ours(file, THREADS, "exact"), logits.ours(file, THREADS)
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    with logits.llama(python, file, THREADS) as theirs:
        for ids in windows:
            true = exact(ids).astype(np.float64)
            size = np.linalg.norm(true - true.mean(-1, keepdims=True), axis=-1)
            for name, source in (("ours", ours), ("theirs", theirs)):
                found[name] += (np.linalg.norm(source(ids) - true, axis=-1) / size).tolist()
    return {name: float(np.median(errors)) for name, errors in found.items()}


def _version(python: str) -> str:
    command = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def failures(row: dict[str, Any]) -> list[str]:
    """The comparisons of a family in which tokens differ that do not tie."""
    compared = ((source, row.get(source)) for source in ("folder", "gguf", "gpu", "llama"))
    return [source for source, found in compared if found and found["equal"] + found["ties"] < found["tokens"]]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("families", nargs="*", help="model types; all if none is named")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    parser.add_argument("--device", default="cpu", help="of GpuDecoder")
    parser.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"), help="a Python with llama-cpp-python")
    arguments = parser.parse_args()
    if not arguments.page:
        torch.set_num_threads(THREADS)
        path = arguments.results / page.RESULT.name
        known = {row["class"]: row for row in json.loads(path.read_text())["figures"]} if path.exists() else {}
        served = list(served_families())
        if unknown := {*arguments.families} - {family.model_type for family in served}:
            parser.error(f"not served: {', '.join(sorted(unknown))}")
        commit = machine.facts()["commit"]  # before results change the tree
        broken = False
        for family in served:
            if arguments.families and family.model_type not in arguments.families:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = check(family, Path(folder), arguments.llama_python, arguments.device) | {"commit": commit}
            known[family.class_name] = row
            figures = [known[other.class_name] for other in served if other.class_name in known]
            write(path, {"tie": TIE, "new_tokens": NEW_TOKENS, "figures": figures})
            broken |= bool(failures(row))
            print(family.model_type, "differs: " + ", ".join(failures(row)) if failures(row) else "equal")  # noqa: T201
        if broken:
            sys.exit(1)
    page.PAGE.write_text(page.render(json.loads(page.RESULT.read_text())))


if __name__ == "__main__":
    main()
