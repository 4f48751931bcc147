"""Files of models in tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from gguf import GGUFWriter


def finish(writer: GGUFWriter) -> None:
    """Write a GGUF file to the end."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(
    folder: Path, source: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> Path:
    """Write a folder with the config and tokenizer of `source` and other tensors."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder
