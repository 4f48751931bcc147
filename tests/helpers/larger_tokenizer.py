"""A tokenizer that knows two tokens more than the built-in model has embeddings."""

import json
from pathlib import Path

from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.vocabulary import from_metadata
from ktqueue.loading.model_path import resolve
from ktqueue.loading.tokenizer import library

WORD, SPECIAL = "dragonfruit", "<|beyond|>"


def write_larger_tokenizer(folder: Path) -> None:
    """Write the built-in model's tokenizer as a folder, with the tokens SPECIAL and WORD behind all others."""
    data = from_metadata(read_header(resolve("demo")).metadata, "demo")
    model = library.build(data, "demo")
    model.add_special_tokens([SPECIAL])
    model.add_tokens([WORD])
    model.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": data.tokens[data.ids["eos"]], "chat_template": data.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
