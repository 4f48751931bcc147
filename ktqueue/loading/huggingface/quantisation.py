"""What `quantization_config` of a Hugging Face config says about the weights, and which kinds are read. Knows no
tensors.

How activations would be quantised, with or without stored scales, is ignored: our activations have their own types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import MAX_CHARACTERS, short_repr, short_text
from ktqueue.families.table import family_of_type
from ktqueue.loading.storage_format import StorageFormat, packaged_formats

SUPPORTED = (
    "safetensors in F32, F16 or BF16, FP8, compressed-tensors (FP8, INT8, INT4, NVFP4, MXFP4), GPTQ, "
    "AWQ and AutoRound in 4 bits, NVFP4 of ModelOpt, MXFP4 of gpt-oss and Quark, and GGUF files"
)
METHODS = {
    "auto-round": "AutoRound",
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
    "quark": "Quark",
    "torchao": "torchao",
}
"""Methods by their names in configs, read or refused, and as their authors write them."""
_KEYS = ("quantization_config", "compression_config")
_COMPRESSED_FORMATS = ("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized")
_PACKED, _FLOAT4 = "pack-quantized", ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the tensors of quantised weights are stored.

    method: fp8, compressed-tensors, nvfp4 (ModelOpt's), quark, gptq, awq, or that of a package's format. block: rows
    and columns of weights that share a scale, if the config states them. bits: of a code of GPTQ. symmetric: GPTQ's
    zero points are all half of the codes. zero_offset: GPTQ's zero points are stored less this. packaged: a package's
    format of all matrices.
    """

    method: str
    block: tuple[int, int] | None = None
    bits: int = 4
    symmetric: bool = False
    zero_offset: int = 0
    packaged: StorageFormat | None = None


def read_quantisation(config: Mapping[str, Any], source: str) -> Quantisation | None:
    """Return how the weights of a folder are quantised, or None if they are not, or as gpt-oss's are.

    config: the values of config.json. source: the beginning of the message. Raises CheckpointError that names a method
    which is not read.
    """
    text_config = config.get("text_config")
    found = None
    for values in (config, text_config if isinstance(text_config, Mapping) else {}):
        for key in _KEYS:
            if not (value := values.get(key)):
                continue
            name = str(value.get("quant_method") or value.get("quant_algo")).lower() if isinstance(value, dict) else ""
            if name and name == family_of_type(values.get("model_type")).quant_method:
                continue
            quantisation = _read(name, value) if values is config and isinstance(value, dict) else None
            if not isinstance(quantisation, Quantisation):
                method = _method(value) + (f", {quantisation}" if quantisation else "")
                raise CheckpointError(
                    f"{source}: {key} says that the weights are quantised with {method}, which is not supported; "
                    f"supported are {SUPPORTED}: look for a GGUF of the model, or for its original in BF16",
                    param=key,
                    limit=SUPPORTED,
                    value=method,
                )
            found = quantisation
    return found


def _read(name: str, value: Mapping[str, Any]) -> Quantisation | str | None:
    """Return how weights are quantised, or what is not read, or None if it is the whole method."""
    if name in ("fp8", "fbgemm_fp8") or (name == "modelopt" and value.get("quant_algo") == "FP8"):
        stated = value.get("weight_block_size")
        block = _block(stated)
        return f"weight_block_size {stated!r}" if stated is not None and block is None else Quantisation("fp8", block)
    if name == "modelopt" and value.get("quant_algo") == "NVFP4":
        return Quantisation("nvfp4")
    if name == "modelopt":
        return f"quant_algo {value.get('quant_algo')!r}"
    if name == "compressed-tensors":
        return _read_compressed(value)
    if name == "quark":
        return _read_quark(value)
    if name == "gptq":
        return _read_gptq(value)
    if name == "auto-round":
        return _read_auto_round(value)
    if name == "awq":
        version = str(value.get("version") or "gemm").lower()
        if value.get("bits", 4) != 4:
            return None
        return Quantisation("awq") if version == "gemm" else f"version {version}"
    if name in METHODS:
        return None
    packaged = (found for found in packaged_formats() if found.folder and found.folder.quant_method == name)
    return next((Quantisation(name, packaged=found) for found in packaged), None)


def _read_gptq(value: Mapping[str, Any]) -> Quantisation | str | None:
    bits, symmetric = value.get("bits"), value.get("sym", True) is True
    layout = value.get("checkpoint_format") or "gptq"
    if bits != 4 and not (bits == 8 and symmetric):
        return None
    if layout not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {layout!r}"
    dynamic = value.get("dynamic")
    if isinstance(dynamic, Mapping) and any(not str(rule).startswith("-:") for rule in dynamic):
        return "dynamic bits"
    return Quantisation("gptq", bits=bits, symmetric=symmetric, zero_offset=1 if layout == "gptq" else 0)


def _read_auto_round(value: Mapping[str, Any]) -> Quantisation | str | None:
    """Read Intel's AutoRound, which stores GPTQ's or AWQ's tensors. Source: its export_to_autoround/export.py."""
    stated, bits = str(value.get("packing_format") or "auto_round:auto_gptq"), value.get("bits")
    layers = value.get("extra_config")
    layers = [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []
    if others := [layer["bits"] for layer in layers if layer.get("bits", bits) not in (bits, 16)]:
        return f"{others[0]} bits in extra_config"
    if value.get("data_type", "int") != "int":
        return f"data_type {value['data_type']!r}"
    if stated.endswith("gptq"):
        return _read_gptq({"bits": bits, "sym": value.get("sym", True)})
    return Quantisation("awq") if stated.endswith("awq") and bits == 4 else f"packing_format {stated!r}"


def _read_compressed(value: Mapping[str, Any]) -> Quantisation | str:
    """Read compressed-tensors. Source: its config/base.py and quantization/quant_args.py."""
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "without config_groups"
    stated = value.get("format")
    block = None
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        layout = (group.get("format") if isinstance(group, Mapping) else None) or stated
        if not isinstance(weights, Mapping):
            continue
        kind = (weights.get("type"), weights.get("num_bits"))
        kinds = {_PACKED: (("int", 4), ("int", 8)), **dict.fromkeys(_FLOAT4, (("float", 4),))}
        known = kind in kinds.get(str(layout), (("float", 8), ("int", 8)))
        if layout not in (*_COMPRESSED_FORMATS, *kinds) or not known:
            return f"format {layout!r} with {kind[0]} of {kind[1]} bits"
        block = _block(weights.get("block_structure")) or block
    sparsity = value.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparsity_config {sparsity.get('format')!r}"
    if value.get("transform_config"):
        return "transform_config"
    return Quantisation("compressed-tensors", block)


def _read_quark(value: Mapping[str, Any]) -> Quantisation | str:
    """Read AMD Quark's weights in FP8 and MXFP4. Source: vLLM's quantization/quark/quark.py."""
    schemes = [value.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        schemes += [*stated.values()] if isinstance(stated := value.get(key), Mapping) else []
    stated_weights = [scheme.get("weight") for scheme in schemes if isinstance(scheme, Mapping)]
    if not (of_weights := [weights for weights in stated_weights if isinstance(weights, Mapping)]):
        return "without a weight of global_quant_config"
    block = None
    for weights in of_weights:
        block = _block(weights.get("block_size")) or block
        kind = (weights.get("dtype"), weights.get("group_size"), weights.get("scale_format"))
        if kind[0] != "fp8_e4m3" and kind != ("fp4", 32, "e8m0"):
            return f"weights in {kind[0]} with {kind[2]} scales of {kind[1]}"
    return Quantisation("quark", block)


def _block(value: Any) -> tuple[int, int] | None:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
    return (value[0], value[1]) if is_pair else None


def _method(value: Any) -> str:
    """Return the name of the method, and the bits of a weight if they are known."""
    if not isinstance(value, Mapping):
        return short_repr(value)
    name = value.get("quant_method") or value.get("quant_algo")
    if name is None and (value.get("load_in_4bit") or value.get("load_in_8bit")):
        name = "bitsandbytes"
    shown = METHODS.get(str(name).lower(), short_text(name)[:MAX_CHARACTERS]) if name else "an unnamed method"
    bits = value.get("bits") or value.get("w_bit") or (4 if value.get("load_in_4bit") else None)
    bits = bits or (8 if value.get("load_in_8bit") else None)
    return f"{shown} in {bits} bits" if isinstance(bits, int) else shown
