"""ggml's tensor types: their names, and the quantisers that the gguf library has for them."""

import gguf
import numpy as np

from ktqueue.loading.weight_formats import Bytes, Floats

WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "MXFP4")  # what the library can quantise among our types


def type_name(type_id: int) -> str:
    """ggml's number of a tensor type to its name, such as `Q4_K`; an unknown number to `type 99`."""
    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"type {type_id}"


def quantize(values: Floats, quant: str) -> Bytes:
    """[rows, columns] float32 to [rows, row bytes]. `quant` is one of WRITABLE."""
    packed = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType[quant])
    result: Bytes = np.ascontiguousarray(packed).view(np.uint8).reshape(values.shape[0], -1)
    return result
