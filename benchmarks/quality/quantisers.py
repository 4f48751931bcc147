"""Errors of our quantisers beside those of llama.cpp's, with and without an importance matrix.

    python -m benchmarks.quality.quantisers --llama-python PYTHON

The error is the sum of squared differences, each weighted by its column's importance. An importance matrix holds the
mean squares of the activations, so this is the expected squared error of a product.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

from benchmarks.command import add_cpu_arguments, command_line
from benchmarks.results import write
from ktqueue.loading.load import open_checkpoint
from ktqueue.loading.model_path import resolve
from ktqueue.loading.quantize import quantize
from ktqueue.loading.weight_formats import Bytes, Floats, row_bytes

FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
DEMO_MATRIX = "model.layers.0.self_attn.q_proj.weight"
ROWS, COLUMNS = 128, 2048


def packed_by_llama(python: str, quant: str, values: Floats, importance: Floats | None = None) -> Bytes:
    """Quantise [rows, columns] float32 with llama.cpp. importance: [columns] float32. Returns the bytes."""
    columns = values.shape[1]
    kind = int(gguf.GGMLQuantizationType[quant])
    words = [python, str(Path(__file__).with_name("ggml_quantize.py")), kind, columns, row_bytes(quant, columns)]
    first = b"" if importance is None else importance.tobytes()
    done = subprocess.run(
        [str(word) for word in words] + ["importance"] * bool(first),
        input=first + np.ascontiguousarray(values, np.float32).tobytes(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return np.frombuffer(done.stdout, np.uint8).reshape(len(values), -1)


def matrices() -> Iterator[tuple[str, Floats]]:
    """Yield what is quantised, [rows, columns], with its name."""
    draw = np.random.default_rng(1)
    yield "normal", (draw.normal(size=(ROWS, COLUMNS)) * 0.02).astype(np.float32)
    yield "Student's t, 4 degrees", (draw.standard_t(4, size=(ROWS, COLUMNS)) * 0.02).astype(np.float32)
    checkpoint = open_checkpoint(str(resolve("demo")))
    yield "demo model, queries", checkpoint.decode(DEMO_MATRIX, torch.float32).numpy()
    checkpoint.close()


def importances(columns: int) -> Iterator[tuple[str, Floats | None]]:
    """Yield the importance of columns, with a name: from none to a few columns that matter alone."""
    draw = np.random.default_rng(3)
    yield "none", None
    yield "log-normal, sigma 1", draw.lognormal(sigma=1, size=columns).astype(np.float32)
    yield "log-normal, sigma 2", draw.lognormal(sigma=2, size=columns).astype(np.float32)
    few = np.full(columns, 1e-3, np.float32)
    few[draw.integers(0, columns, columns // 50)] = 100
    yield "2 % of columns", few
    most = np.ones(columns, np.float32)
    most[: columns // 4] = 0
    yield "0 for a quarter", most


def weighted_error(quant: str, packed: Bytes, values: Floats, importance: Floats | None) -> float:
    """Return the sum of the squared errors, weighted by the importance of their column."""
    squares = np.square(gguf.dequantize(packed, gguf.GGMLQuantizationType[quant]).astype(np.float64) - values)
    return float((squares if importance is None else squares * importance).sum())


def main() -> None:
    parser = command_line(__doc__)
    add_cpu_arguments(parser)
    python = parser.parse_args().llama_python
    if python is None:
        parser.error("--llama-python is needed")
    rows = []
    for name, values in matrices():
        for kind, importance in importances(values.shape[1]):
            ratios = {}
            for quant in FORMATS:
                ours = quantize(values, quant, importance)
                theirs = packed_by_llama(python, quant, values, importance)
                errors = [weighted_error(quant, packed, values, importance) for packed in (ours, theirs)]
                ratios[quant] = errors[0] / errors[1]
            rows.append({"weights": name, "importance": kind, "ratios": ratios})
    write(parser.parse_args().results / "quantisers.json", {"figures": rows})


if __name__ == "__main__":
    main()
