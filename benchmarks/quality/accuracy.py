"""How far from float: logits of our engine and of llama.cpp against the float twin on the same file.

    python -m benchmarks.quality.accuracy synthetic:mid:q4_k_m... --llama-python PYTHON

What separates both from the twin is the rounding of activations, and in random models what follows from it: a near tie
at the edge of the router's choice swaps an expert. Hence medians.
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.command import add_cpu_arguments, command_line
from benchmarks.quality import logits
from benchmarks.results import write
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve
from ktqueue.loading.synthetic.checkpoint import write_synthetic
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

FAR = 0.1  # a token whose logits differ by more, relatively, has most likely met another expert


def compare(path: Path, windows: Sequence[list[int]], threads: int, llama_python: str | None) -> dict[str, Any]:
    """Perplexity of each source on the windows (every token but a window's first is scored), and how far ours and
    llama.cpp's logits are from the twin's."""
    with ExitStack() as stack:
        sources = {"twin": logits.twin(path), "ktqueue": logits.ours(path, threads)}
        if llama_python:
            sources["llama.cpp"] = stack.enter_context(logits.llama(llama_python, path, threads))
        measured: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in sources}
        for ids in windows:
            scores = {name: torch.from_numpy(source(ids)).double() for name, source in sources.items()}
            for name in sources:
                measured[name].append(_measure(ids, scores[name], scores["twin"]))
    return {name: _summary(parts) for name, parts in measured.items()}


def _measure(ids: list[int], scores: torch.Tensor, true: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measures of each token, `[tokens]`. scores, true: `[tokens, vocab]` logits."""
    said, wanted = torch.log_softmax(scores, -1), torch.log_softmax(true, -1)
    return {
        "loss": -said[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0],
        "error": (scores - true).norm(dim=-1) / true.norm(dim=-1),
        "divergence": (wanted.exp() * (wanted - said)).sum(-1),
        "same": (scores.argmax(-1) == true.argmax(-1)).double(),
    }


def _summary(windows: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    whole = {name: torch.cat([window[name] for window in windows]) for name in windows[0]}
    return {
        "perplexity": math.exp(whole["loss"].mean()),
        "median_error": float(whole["error"].median()),
        "far_tokens": float((whole["error"] > FAR).double().mean()),
        "mean_divergence": float(whole["divergence"].mean()),
        "median_divergence": float(whole["divergence"].median()),
        "same_token": float(whole["same"].mean()),
    }


def _file(model: str, folder: Path) -> Path:
    if not model.startswith(SYNTHETIC_PREFIX):
        return resolve(model)
    path = folder / f"{model}.gguf"
    write_synthetic(model, path)
    return path


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", help="GGUF files, demo, or synthetic:SHAPE:QUANT")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=256, help="tokens, drawn at random")
    add_cpu_arguments(parser)
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            path = _file(model, Path(folder))
            size, draw = load_tokenizer(str(path)).size, Random(7)
            windows = [[draw.randrange(size) for _ in range(arguments.window)] for _ in range(arguments.windows)]
            figures[path.stem] = compare(path, windows, arguments.threads, arguments.llama_python)
    write(
        arguments.results / "accuracy.json",
        {"tokens": arguments.windows * arguments.window, "window": arguments.window, "figures": figures},
    )


if __name__ == "__main__":
    main()
