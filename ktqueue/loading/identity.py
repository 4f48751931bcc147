"""The identity of a model: one digest of everything that decides its tokens, computed while the model is loaded.

Workers with the same digest may continue each other's jobs: they have the same weights, tokenizer, chat template and
settings. The digest leaves out what changes only the order of roundings: threads, batches, instruction sets, attention
backends, and which experts are on a GPU.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from ktqueue.core.codec import dumps
from ktqueue.core.errors import CheckpointError, Unavailable
from ktqueue.loading.gguf.checkpoint import part_paths
from ktqueue.loading.huggingface.checkpoint import weight_files
from ktqueue.loading.huggingface.hub_files import LEGACY_TEMPLATE, MODELOPT_FILE, TOOL_TEMPLATE, VOCABULARIES
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve
from ktqueue.loading.plan import LoadPlan
from ktqueue.loading.tokenizer.added_tokens import FILE as ADDED_TOKENS
from ktqueue.loading.tokenizer.added_tokens import SPECIAL_TOKENS_FILE

COMPUTATION = 2  # a release that computes other tokens from the same weights and settings increases it
DIGEST_CHARACTERS = 32  # of hexadecimal: 128 bits
PART_BYTES = 64 << 20
READ_BYTES = 4 << 20
FOLDER_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "tiktoken.model",
)  # fmt: skip
"""Their order is a part of every digest, so that a change strands started jobs."""
MAX_THREADS = 8

_State = tuple[int, ...]  # fields that change when a file is written


class ModelFiles:
    """Hashes all bytes of a model's files on its own threads. Hashing begins with the `with` block.

    `model`, `tokenizer`: the settings with these names. `part_bytes` are hashed by one thread at a time. Raises
    CheckpointError if a file does not exist.
    """

    def __init__(self, model: str, tokenizer: str | None, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        settings = [setting for setting in (model, tokenizer) if setting]
        self._name = "\n".join(setting for setting in settings if setting.startswith(SYNTHETIC_PREFIX))
        on_disk = [setting for setting in settings if not setting.startswith(SYNTHETIC_PREFIX)]
        paths = [path for setting in on_disk for path in _files(setting)]
        self._states = {path: _state(path) for path in paths}
        self._parts: list[list[Future[bytes]]] = []
        self._pool = ThreadPoolExecutor(
            min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="hash weights"
        )

    def __enter__(self) -> Self:
        for path, (size, *_) in self._states.items():
            starts = range(0, size, self._part_bytes)
            self._parts.append(
                [self._pool.submit(_hash_part, path, start, min(self._part_bytes, size - start)) for start in starts]
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def wait(self) -> None:
        """Wait until all files are read. Raises CheckpointError, Unavailable if a file cannot be read completely."""
        for parts in self._parts:
            for part in parts:
                part.result()

    def digest(self, settings: Mapping[str, Any]) -> str:
        """Wait until all files are read and return the model's digest in hexadecimal.

        For `settings` see `digest_settings`. Raises Unavailable if a file has changed since the start: the loaded model
        may then mix old and new bytes. A restart may find the file complete.
        """
        digest = hashlib.sha256(dumps([COMPUTATION, self._name, dict(settings)]))
        for parts in self._parts:
            digest.update(hashlib.sha256(b"".join(part.result() for part in parts)).digest())
        for path, state in self._states.items():
            if _state(path) != state:
                raise Unavailable(f"{path}: the file was changed while it was loaded")
        return digest.hexdigest()[:DIGEST_CHARACTERS]


def digest_settings(
    plan: LoadPlan,
    *,
    dtype: str,
    kv_cache_dtype: str,
    packages: Sequence[str] = (),
    original_length: int = 0,
    cache_scales: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """Return the settings that decide tokens. Names of rule files and numbers of devices do not.

    packages: names and versions of the installed packages whose code computes a part of the model. original_length,
    cache_scales: see KVLayout. Earlier releases compute nothing beyond that length, and have no scales.
    """
    scales = [[*scale] for scale in cache_scales]
    added = {"packages": [*packages], "original_length": original_length, "cache_scales": scales}
    settings: dict[str, Any] = {name: value for name, value in added.items() if value}  # others keep their digests
    return settings | {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "deferred_experts": 0,  # a removed setting; without it every model would get another digest
        "operators": [[item.name, item.op, sorted(item.options.items())] for item in plan.replacements],
        "devices": sorted((name, device.partition(":")[0]) for name, device in plan.devices.items()),
    }


def _files(setting: str) -> list[Path]:
    """Return all files of a model or tokenizer that loading may read, in a fixed order."""
    found = resolve(setting)
    if not found.is_dir():
        return part_paths(found)
    vocabulary = next((name for name in VOCABULARIES if (found / name).exists()), VOCABULARIES[0])
    names = list(FOLDER_FILES)
    if vocabulary != VOCABULARIES[0]:  # see plain_vocabulary
        names += [name for name in (vocabulary, ADDED_TOKENS, SPECIAL_TOKENS_FILE) if name not in names]
    weights = weight_files(found) if (found / "config.json").exists() else []
    names += [name for name in (MODELOPT_FILE, LEGACY_TEMPLATE, TOOL_TEMPLATE) if (found / name).exists()]
    return [path for path in (*(found / name for name in names), *weights) if path.exists()]


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return (status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _hash_part(path: Path, start: int, size: int) -> bytes:
    """Hash a part of a file. The file is read, not mapped, so that a truncated file raises an error."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size:
                data = file.read(min(size, READ_BYTES))
                if not data:
                    raise Unavailable(f"{path}: the file was truncated while it was loaded")
                digest.update(data)
                size -= len(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return digest.digest()
