"""One installation with the built-in model for all foreign clients of a session."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Process, environment, serving

from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.vocabulary import from_metadata
from ktqueue.loading.model_path import resolve
from ktqueue.loading.tokenizer import library

PYTHON = os.environ.get("KTQUEUE_SERVER_PYTHON", sys.executable)
"""Runs the server: the environment of a client may have other versions of what the server imports."""


@dataclass(frozen=True)
class ClientsServer:
    """A running `ktqueue up`. `root` is its address, `base_url` that of OpenAI's API."""

    root: str
    api_key: str = "unused"
    model: str = "demo"

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


def start(*words: object, cwd: Path, env: dict[str, str] | None = None) -> Process:
    return Process(
        [PYTHON, "-m", "ktqueue", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(env),
    )


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientsServer]:
    with serving(start, tmp_path_factory.mktemp("up"), "--threads", "1") as running:
        yield ClientsServer(running.url)


@pytest.fixture(scope="session")
def brief_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientsServer]:
    """A server whose longest answers take a second or two: 4,096 tokens can take a minute on a busy machine."""
    with serving(start, tmp_path_factory.mktemp("up"), "--threads", "1", "--max-model-len", "512") as running:
        yield ClientsServer(running.url)


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientsServer]:
    """A server that computes all weights in float32, as transformers does."""
    with serving(start, tmp_path_factory.mktemp("up"), "--threads", "1", "--rules", "exact") as running:
        yield ClientsServer(running.url)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the built-in model as a folder of transformers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = from_metadata(read_header(resolve("demo")).metadata, "demo")
    library.build(vocabulary, "demo").save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": vocabulary.tokens[vocabulary.ids["eos"]]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))  # aiperf looks for it
    return folder
