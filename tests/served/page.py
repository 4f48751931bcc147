"""Renders docs/reference/models.md from the results of `make models` and from the tables of the code."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.results import RESULTS
from benchmarks.tables import table
from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import UnsupportedFamily
from ktqueue.families.table import BY_CLASS
from ktqueue.families.unsupported import UNSUPPORTED
from ktqueue.loading.huggingface.quantisation import METHODS, read_quantisation
from ktqueue.loading.synthetic.shapes import SHAPES
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ktqueue.loading.weight_formats import FILE_BLOCKS, FOLDER_FORMATS, loaded_format
from ktqueue.operators.native import packed_bytes

PAGE = ROOT / "docs" / "reference" / "models.md"
RESULT = RESULTS / "models.json"
QUANTISED = "q8_0"
"""The type of the files whose errors are compared with llama.cpp's."""
ON_GPU = RESULTS / "families-on-gpu.json"
_READ_OF = {
    "auto-round": "4 or 8 bits",
    "awq": "4 bits",
    "compressed-tensors": "FP8, INT8, INT4, NVFP4, MXFP4",
    "gptq": "4 or 8 bits",
    "modelopt": "FP8, NVFP4",
    "mxfp4": "of gpt-oss",
    "quark": "FP8, MXFP4",
}
"""What is read of a method, if it is not all."""
_SAMPLES: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
    },
    "auto-round": {"bits": 4},
    "gptq": {"bits": 4},
    "modelopt": {"quant_algo": "FP8"},
    "quark": {"global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
}
"""What else the config of a method says that is read, if it must say more than its name."""
UNLIKE_LLAMA = ("phimoe",)
"""Model types whose files llama.cpp loads, but computes in another way than transformers."""


def render(result: Mapping[str, Any]) -> str:
    """Return the page. result: what `make models` has written."""
    parts = (
        _head(result),
        _families(result),
        *([_on_gpu(json.loads(ON_GPU.read_text()))] if ON_GPU.exists() else []),
        _files(),
        _folders(),
        _tokenizers(),
        _refused(),
        _shapes(),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(result: Mapping[str, Any]) -> list[str]:
    return [
        "# Models",
        "Does my model run? Look for its family, its format and its tokenizer below. `ktqueue inspect --model M`",
        "answers for one model, and `ktqueue fit` for one machine. Limits are in",
        "[serving](../guides/serving.md#which-models). `make models` makes this page.",
    ]


def _families(result: Mapping[str, Any]) -> list[str]:
    packages = result["machine"]["packages"]
    llama = next((row["llama"]["version"] for row in result["figures"] if row.get("llama")), None)
    versions = f"transformers {packages['transformers']}, torch {packages['torch']}" + (
        f", llama-cpp-python {llama}" if llama else ""
    )
    return [
        "## Families",
        "Each family is a tiny random model with the layers of its kind, in float32 and under the rules `exact`.",
        "The engine gets 64 greedy requests at random steps, some with a shared prefix. Prompts have 1 to 160 tokens,",
        "and steps at most 48, so prompts are read in chunks. The cache has 16 pages, so sequences are preempted.",
        f"To each of the {result['new_tokens']} tokens of an answer, the other must give the highest logit.",
        f"A tie is a token whose logit is less than {result['tie']} below the highest.",
        "",
        f"Taken {result['machine']['taken']} with {versions}; the commit of each family is in",
        "[models.json](../../benchmarks/results/models.json).",
        "",
        *table(
            {
                "family": _name,
                "`model_type`": "`{model_type}`",
                "folder": lambda row: "yes" if "folder" in row else "-",
                "GGUF": _architecture,
                "CPU operator": _operators,
                "GPU operator": lambda row: "GpuDecoder" if "gpu" in row else "modules (1)",
                "equal to transformers": _equal,
                "equal to llama.cpp on the same file": _llama,
                f"error in {QUANTISED.upper()}, beside llama.cpp's": _quantised,
            },
            result["figures"],
            words=9,
        ),
        "",
        "1. The modules are those of transformers, with our attention and our experts and matrices on the CPU. They",
        "   were not run on a GPU for this page. Other causal models of transformers run in the same way, if their",
        "   attention is causal, is called once a layer, and keeps only keys and values: `ktqueue inspect` tells.",
        "2. This llama.cpp cannot load the file.",
        "3. Without YaRN. llama.cpp rounds the borders of YaRN's ramp to whole columns, as gpt-oss does not. With",
        "   YaRN, 43 of the 1,024 tokens differ, in heads of 16 columns.",
        "4. llama.cpp has RMSNorms and a softmax over the experts where Phi-3.5-MoE has LayerNorms and SparseMixer.",
        "",
        "GpuDecoder was run on the CPU, with the twins of its kernels and without CUDA graphs. Figures of GPUs are in",
        "[gpu.md](../../benchmarks/figures/gpu.md). Beside llama.cpp's counts is the largest difference of two logits,",
        "relative to the largest logit.",
        "",
        f"The last column is of the same models in {QUANTISED.upper()}: the median error of a token's logits, ours and",
        "llama.cpp's, that comes from rounded activations. A token's error is large where that changes the choice of",
        "its experts. Linear attention makes it larger: if inputs of matrices are rounded as llama.cpp rounds them,",
        "transformers' own logits of a random Qwen3-Next change by 7.6%, to within 1% of llama.cpp's.",
    ]


def _on_gpu(result: Mapping[str, Any]) -> list[str]:
    """What `python -m tests.served.on_gpu` found, a line for each family."""
    figures: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in result["figures"]:
        figures.setdefault(row["class"], {})[row["dtype"], row["experts"]] = row
    rows = [{"class": name, "found": found} for name, found in figures.items()]
    device, most = result["device"], max(row.get("tokens", 0) for row in result["figures"])
    return [
        "## On a GPU",
        "The same requests on a GPU, with captured steps, with all routed experts on the CPU, with half of them in GPU",
        f"memory, and with all of them there. Shown are the tokens, of {most:,}, that are equal to transformers' in",
        "float32 on the CPU, with the same rounded weights. In bfloat16 transformers itself would choose others: it",
        "reads our tokens, and the last column has how many of its own choices are equal. Gemma 2 caps logits, so that",
        "many are the same number in bfloat16; our logits are float32.",
        "",
        f"Taken {result['machine']['taken']} on one {device['gpu']}, CUDA {device['cuda']}, triton {device['triton']},",
        f"FlashInfer {device['flashinfer-python']}. `{result['command']}`",
        "",
        *table(
            {
                "family": _name,
                "float32: experts on the CPU": lambda row: _place(row, "float32", "CPU"),
                "both": lambda row: _place(row, "float32", "both"),
                "GPU": lambda row: _place(row, "float32", "GPU"),
                "bfloat16: CPU": lambda row: _place(row, "bfloat16", "CPU"),
                " both": lambda row: _place(row, "bfloat16", "both"),
                " GPU": lambda row: _place(row, "bfloat16", "GPU"),
                "transformers": _transformers,
            },
            rows,
            words=1,
        ),
    ]


def _place(row: Mapping[str, Any], dtype: str, place: str) -> str:
    without_experts = row["found"].get((dtype, "-")) if place == "GPU" else None
    found = without_experts or row["found"][dtype, place]
    return "failed" if "error" in found else f"{found['equal'] + found['ties']:,}"


def _transformers(row: Mapping[str, Any]) -> str:
    counts = [found["transformers"]["equal"] for found in row["found"].values() if "transformers" in found]
    return f"{min(counts):,} to {max(counts):,}" if min(counts) < max(counts) else f"{counts[0]:,}"


def _name(row: Mapping[str, Any]) -> str:
    name = str(row["class"])
    return BY_CLASS[name].name if name in BY_CLASS else name.removesuffix("ForCausalLM")


def _architecture(row: Mapping[str, Any]) -> str:
    return f"`{row['architecture']}`" if row["architecture"] else "-"


def _operators(row: Mapping[str, Any]) -> str:
    operators = row["folder"]["operators"]
    return ", ".join(operators) if operators == ["CpuDecoder"] else "modules with " + ", ".join(operators)


def _counted(found: Mapping[str, Any]) -> str:
    ties = f", {found['ties']} ties" if found["ties"] else ""
    return f"{found['equal']:,} of {found['tokens']:,}{ties}"


def _equal(row: Mapping[str, Any]) -> str:
    labels = (("folder", "folder"), ("gguf", "GGUF"), ("gpu", "GPU"))
    counts = {label: _counted(row[key]) for key, label in labels if key in row}
    if len({*counts.values()}) == 1:
        return f"{', '.join(counts)}: {next(iter(counts.values()))}"
    return "; ".join(f"{label} {count}" for label, count in counts.items())


def _llama(row: Mapping[str, Any]) -> str:
    if "gguf" not in row:
        return "-"
    if row["model_type"] in UNLIKE_LLAMA:
        return "- (4)"
    if "llama" not in row:
        return "not run"
    found = row["llama"]
    note = " (3)" if row["model_type"] == "gpt_oss" else ""
    return f"{_counted(found)}; logits {found['relative_difference']:.0e}{note}" if found else "- (2)"


def _quantised(row: Mapping[str, Any]) -> str:
    found = (row.get("llama") or {}).get("quantised")
    return f"{found['ours']:.1%}, {found['theirs']:.1%}" if found else "-"


def _files() -> list[str]:
    """The formats of GGUF files, with what they become."""
    rows = [
        {
            "format": quant,
            "bits": f"{8 * size / elements:.4g}",
            "loaded": "the same" if loaded_format(quant) == quant else loaded_format(quant),
        }
        for quant, (elements, size) in FILE_BLOCKS.items()
    ]
    columns = {"format": "{format}", "bits a weight in the file": "{bits}", "in memory": "{loaded}"}
    return [
        "## Formats of GGUF files",
        "In memory, weights have another order and nearly the size of the file; IQ1, IQ2 and IQ3 take more: see",
        "[serving](../guides/serving.md#which-models). Parts of a model may have different formats.",
        "",
        *table(columns, rows, words=3),
    ]


def _folders() -> list[str]:
    """The methods by which folders may be quantised, read and refused."""
    read = {method: _is_read(method) for method in METHODS}
    own = ", ".join(f"{quant} ({packed_bytes(quant, 16, 256) / 512:.4g} bits)" for quant in FOLDER_FORMATS)
    return [
        "## Formats of folders",
        "Safetensors in F32, F16 or BF16, and folders that are quantised with one of these methods:",
        f"{_listed(_with_limits(method) for method, is_read in read.items() if is_read)}.",
        "What is read of each, and what it becomes, is in [serving](../guides/serving.md#which-models). Weights get",
        f"exactly the method's values, in a format of GGUF or in one of our own: {own}.",
        "",
        f"Refused by name: {_listed(METHODS[method] for method, is_read in read.items() if not is_read)}.",
    ]


def _with_limits(method: str) -> str:
    return METHODS[method] + (f" ({_READ_OF[method]})" if method in _READ_OF else "")


def _is_read(method: str) -> bool:
    stated = {"quant_method": method, **_SAMPLES.get(method, {})}
    model_type = "gpt_oss" if method == "mxfp4" else "qwen3_moe"
    try:
        read_quantisation({"model_type": model_type, "quantization_config": stated}, "")
    except CheckpointError:
        return False
    return True


def _tokenizers() -> list[str]:
    return [
        "## Tokenizers",
        "A folder has `tokenizer.json`, `tiktoken.model`, a lone `tokenizer.model` (SentencePiece) or `tekken.json`.",
        "In a GGUF file, `tokenizer.ggml.model` is `llama` (SentencePiece), `gemma4` (the same by merges) or `gpt2`",
        "(bytes). For it, `tokenizer.ggml.pre` is one of:",
        "",
        f"{_listed(f'`{name}`' for name in sorted(PRE_TOKENIZERS))}.",
    ]


def _refused() -> list[str]:
    def refused(family: UnsupportedFamily) -> dict[str, str]:
        return {
            "name": family.name,
            "part": family.part,
            "types": _listed(f"`{name}`" for name in family.model_types) or "-",
            "architectures": _listed(f"`{name}`" for name in family.architectures) or "-",
        }

    columns = {"family": "{name}", "it has": "{part}", "`model_type`": "{types}", "GGUF": "{architectures}"}
    return [
        "## Refused by name",
        "These families are refused before a weight is read or downloaded, for a part that is not computed. Only those",
        "model types and GGUF architectures are refused that are named here.",
        "",
        *table(columns, [refused(family) for family in UNSUPPORTED], words=4),
    ]


def _shapes() -> list[str]:
    rows = [{"shape": shape, "type": values["model_type"], **values} for shape, values in SHAPES.items()]
    columns = {
        "shape": "`{shape}`",
        "`model_type`": "`{type}`",
        "layers": "{num_hidden_layers}",
        "width": "{hidden_size}",
    }
    return [
        "## Shapes without a download",
        "`synthetic:SHAPE:QUANT` has a real model's shape and made-up weights; `:routing=FILE` adds a trace's routing.",
        "For example,",
        "`ktqueue fit --model synthetic:glm-4.6:q4_k_m` tells whether GLM-4.6 fits into this machine.",
        "",
        *table(columns, rows, words=2),
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
