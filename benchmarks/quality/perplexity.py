"""Perplexity of one model in every storage format, ours beside the float twin of the same file.

    python -m benchmarks.quality.perplexity HF_FOLDER TEXT --llama-python PYTHON

Formats that `ktqueue convert` cannot write are quantised by llama.cpp, without an importance matrix. Experts and
attention take the format; embeddings, which also give the logits, take it from 8 bits up and are Q8_0 below. HF_FOLDER
and TEXT may hold .xz files.
"""

import lzma
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import add_cpu_arguments, command_line
from benchmarks.quality import accuracy
from benchmarks.quality.quantisers import packed_by_llama
from benchmarks.quality.scored_texts import Text
from benchmarks.results import write
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.header import GgufHeader, TensorInfo, read_header
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.quantize import WRITABLE, quantize
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.loading.weight_formats import BLOCKS, Bytes, Floats

REFERENCE = "BF16"
EMBEDDING = "token_embd.weight"
WRITERS_OWN = ("general.architecture", "general.quantization_version", "general.file_type", "general.alignment")


def quantize_file(source: GgufHeader, target: Path, quant: str, llama_python: str | None) -> None:
    """The float32 GGUF model `source` as `target`, its matrices packed as `quant`."""
    architecture = source.metadata["general.architecture"]
    with GgufWriter(target, architecture, quant) as writer:
        writer.add_metadata({key: value for key, value in source.metadata.items() if key not in WRITERS_OWN})
        types = [_type(info, quant) for info in source.tensors]
        for info, kind in zip(source.tensors, types, strict=True):
            writer.add_tensor(info.name, kind, info.shape)
        writer.start()
        for info, kind in zip(source.tensors, types, strict=True):
            size = int(np.prod(info.shape))
            values = source.data[info.offset : info.offset + 4 * size].view(np.float32).reshape(-1, info.shape[-1])
            writer.write(_pack(values, kind, llama_python))


def _type(info: TensorInfo, quant: str) -> str:
    if len(info.shape) == 1 or info.name.endswith("ffn_gate_inp.weight"):  # norms, routers
        return "F32"
    elements, size = BLOCKS[quant]
    return "Q8_0" if info.name == EMBEDDING and size / elements < 1 else quant


def _pack(values: Floats, quant: str, llama_python: str | None) -> Bytes:
    if quant in WRITABLE:
        return quantize(values, quant)
    if llama_python is None:
        raise SystemExit(f"{quant} needs --llama-python")
    return packed_by_llama(llama_python, quant, values)


def _unpacked(folder: Path, target: Path) -> Path:
    """A copy of a folder, its .xz files unpacked."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".xz":
            with lzma.open(path) as packed, (target / path.stem).open("wb") as out:
                shutil.copyfileobj(packed, out)
        else:
            shutil.copy(path, target)
    return target


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("weights", type=Path, metavar="HF_FOLDER")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--formats", default=",".join(BLOCKS).lower())
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window", type=int, default=512, help="tokens; all but the first are scored")
    add_cpu_arguments(parser)
    arguments = parser.parse_args()
    text = Text.read(arguments.text)
    formats = [name.upper() for name in arguments.formats.split(",")]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = _unpacked(arguments.weights, Path(name) / "weights")
        windows = text.windows(load_tokenizer(str(folder)).encode, arguments.windows, arguments.window)
        convert(folder, Path(name) / "f32.gguf", experts="f32", dense="f32")
        source = read_header(Path(name) / "f32.gguf")
        for quant in dict.fromkeys([REFERENCE, *formats]):
            sys.stderr.write(f"measuring: {quant}\n")
            path = Path(name) / f"{quant.lower()}.gguf"
            quantize_file(source, path, quant, arguments.llama_python)
            figures[quant] = accuracy.compare(path, windows, arguments.threads, arguments.llama_python)
            path.unlink()
    write(
        arguments.results / "perplexity.json",
        {
            "model": arguments.weights.name,
            "text": {"name": text.name, "bytes": text.bytes, "sha256": text.sha256},
            "window": arguments.window,
            "windows": arguments.windows,
            "reference": REFERENCE,
            "figures": figures,
        },
        digits=8,
    )


if __name__ == "__main__":
    main()
