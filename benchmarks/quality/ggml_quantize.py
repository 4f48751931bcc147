"""llama.cpp's quantiser: float32 rows on standard input to packed rows on standard output.

    python ggml_quantize.py TYPE COLUMNS BYTES_OF_A_ROW

TYPE is ggml's number. Runs under any Python that has llama-cpp-python; imports nothing of ours, nor that package: only
the library in it (ggml_quantize_chunk of libggml-base, ggml.h).
"""

import ctypes
import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Quantise all that comes in."""
    kind, columns, row_bytes = map(int, sys.argv[1:])
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
        ctypes.c_void_p,  # importance matrix: none
    ]
    values = sys.stdin.buffer.read()
    rows = len(values) // (4 * columns)
    packed = ctypes.create_string_buffer(rows * row_bytes)
    if quantize(kind, values, packed, 0, rows, columns, None) != rows * row_bytes:
        raise SystemExit(f"ggml packs type {kind} in rows of another size than {row_bytes}")
    sys.stdout.buffer.write(packed.raw)


if __name__ == "__main__":
    main()
