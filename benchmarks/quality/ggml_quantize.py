"""llama.cpp's quantiser: float32 rows on standard input to packed rows on standard output.

    python ggml_quantize.py TYPE COLUMNS BYTES_OF_A_ROW [importance]

TYPE is ggml's number. With the last word, the first row is not quantised, but is the importance of each column. Runs
under any Python that has llama-cpp-python; imports nothing of ours, nor that package: only the library in it
(ggml_quantize_chunk of libggml-base, ggml.h).
"""

import ctypes
import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Quantise all that comes in."""
    kind, columns, row_bytes = map(int, sys.argv[1:4])
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("this Python has no llama-cpp-python")
    library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libggml-base.so"))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,  # type
        ctypes.c_char_p,  # float32 values
        ctypes.c_char_p,  # packed
        ctypes.c_int64,  # first element
        ctypes.c_int64,  # rows
        ctypes.c_int64,  # columns
        ctypes.c_char_p,  # importance of the columns, or none
    ]
    values, importance = sys.stdin.buffer.read(), None
    if sys.argv[4:] == ["importance"]:
        importance, values = values[: 4 * columns], values[4 * columns :]
    rows = len(values) // (4 * columns)
    packed = ctypes.create_string_buffer(rows * row_bytes)
    if quantize(kind, values, packed, 0, rows, columns, importance) != rows * row_bytes:
        raise SystemExit(f"ggml packs type {kind} in rows of another size than {row_bytes}")
    sys.stdout.buffer.write(packed.raw)


if __name__ == "__main__":
    main()
