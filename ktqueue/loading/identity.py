"""The identity of a model: one digest of all that decides its tokens, made while the model is loaded.

Two workers with one digest go on with each other's jobs: the same weights, tokenizer, chat template and settings of the
computation. Not in it is what changes no more than the order of roundings: threads, batches, instruction sets,
attention backends, and which experts lie on a GPU.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ktqueue.core.codec import dumps
from ktqueue.core.errors import CheckpointError, Unavailable
from ktqueue.loading.gguf.checkpoint import part_paths
from ktqueue.loading.huggingface.checkpoint import weight_files
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve
from ktqueue.loading.plan import LoadPlan
from ktqueue.loading.tokenizer.files import TOKENIZER_FILES

COMPUTATION = 1  # to be raised by a release that computes other tokens from the same weights and settings
DIGEST_CHARACTERS = 32  # of hexadecimal: 128 bits
LEAF_BYTES = 64 << 20  # that one thread hashes by itself
READ_BYTES = 4 << 20
MAX_THREADS = 8

_State = tuple[int, ...]  # what changes with a file's content


class ModelFiles:
    """Hashes all bytes of a model's files, on threads of its own, from the start of the `with` block on.

    `model`, `tokenizer`: the settings of these names. Raises CheckpointError where a file is not there.
    """

    def __init__(self, model: str, tokenizer: str | None) -> None:
        self._name = "\n".join(one for one in (model, tokenizer) if one and one.startswith(SYNTHETIC_PREFIX))
        paths = [
            path for one in (model, tokenizer) if one and not one.startswith(SYNTHETIC_PREFIX) for path in _files(one)
        ]
        self._states = {path: _state(path) for path in paths}
        self._leaves: list[list[Future[bytes]]] = []
        self._pool = ThreadPoolExecutor(
            min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="hash weights"
        )

    def __enter__(self) -> Self:
        for path, (size, *_) in self._states.items():
            starts = range(0, size, LEAF_BYTES)
            self._leaves.append(
                [self._pool.submit(_leaf, path, start, min(LEAF_BYTES, size - start)) for start in starts]
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def digest(self, settings: Mapping[str, Any]) -> str:
        """The model's digest, in hexadecimal; waits until all is read. `settings`: see `compute_settings`.

        Raises Unavailable where a file has been changed since the beginning, so that what was loaded is perhaps neither
        the one nor the other: a new start may find it whole.
        """
        whole = hashlib.sha256(dumps([COMPUTATION, self._name, dict(settings)]))
        for leaves in self._leaves:
            whole.update(hashlib.sha256(b"".join(leaf.result() for leaf in leaves)).digest())
        for path, state in self._states.items():
            if _state(path) != state:
                raise Unavailable(f"{path}: the file was changed while it was loaded")
        return whole.hexdigest()[:DIGEST_CHARACTERS]


def digest_settings(plan: LoadPlan, *, dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
    """What of the settings decides tokens. The names of rule files and the numbers of devices do not."""
    return {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "deferred_experts": 0,  # a removed setting; without it every model would get another digest
        "operators": [[one.name, one.op, sorted(one.options.items())] for one in plan.replacements],
        "devices": sorted((name, device.partition(":")[0]) for name, device in plan.devices.items()),
    }


def _files(setting: str) -> list[Path]:
    """All files of a model or tokenizer that loading may read, in an order of their own."""
    found = resolve(setting)
    if not found.is_dir():
        return part_paths(found)
    names = ("config.json", *TOKENIZER_FILES)
    weights = weight_files(found) if (found / "config.json").exists() else []
    return [path for path in (*(found / name for name in names), *weights) if path.exists()]


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return (status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _leaf(path: Path, start: int, size: int) -> bytes:
    """The hash of a part of a file. It is read, not mapped: of a file that is cut meanwhile there is an error."""
    made = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size:
                data = file.read(min(size, READ_BYTES))
                if not data:
                    raise Unavailable(f"{path}: the file was cut while it was loaded")
                made.update(data)
                size -= len(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return made.digest()
