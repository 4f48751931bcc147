"""What a Hugging Face config says of quantised weights, and the refusal of those that cannot be read. Pure."""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError

SUPPORTED = "safetensors in F32, F16 or BF16, and GGUF files"
_METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "torchao": "torchao",
}
_KEYS = ("quantization_config", "compression_config")


def check_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError naming the method of a checkpoint that is quantised in another way than GGUF's.

    config: the values of config.json. source: what the message begins with.
    """
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _KEYS:
            if stated := values.get(key):
                method = _method(stated)
                raise CheckpointError(
                    f"{source}: {key} says that the weights are quantised with {method}, which is not supported; "
                    f"supported are {SUPPORTED}: look for a GGUF of the model, or for its original in BF16",
                    param=key,
                    limit=SUPPORTED,
                    value=method,
                )


def _method(stated: Any) -> str:
    """Its name, and the bits of a weight where they are stated."""
    if not isinstance(stated, Mapping):
        return repr(stated)
    name = stated.get("quant_method") or stated.get("quant_algo")
    if name is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        name = "bitsandbytes"
    shown = _METHODS.get(str(name).lower(), str(name)) if name else "an unnamed method"
    bits = stated.get("bits") or stated.get("w_bit") or (4 if stated.get("load_in_4bit") else None)
    bits = bits or (8 if stated.get("load_in_8bit") else None)
    return f"{shown} in {bits} bits" if isinstance(bits, int) else shown
