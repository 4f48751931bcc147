"""ggml's tensor types: their names, and the gguf library's quantisers for some of them."""

import gguf
import numpy as np

from ktqueue.loading.weight_formats import Bytes, Floats

WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "MXFP4")  # those of our formats that the library can quantise


def type_name(type_id: int) -> str:
    """Return the name of ggml's tensor type number, such as `Q4_K`. An unknown number gives `type 99`."""
    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"type {type_id}"


def quantize(values: Floats, quant: str) -> Bytes:
    """Quantise [rows, columns] float32 to [rows, bytes per row]. `quant` is one of WRITABLE."""
    packed = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType[quant])
    result: Bytes = np.ascontiguousarray(packed).view(np.uint8).reshape(values.shape[0], -1)
    return result
