"""RoutingFile: writes which experts a worker's tokens chose, as a trace that synthetic weights can follow."""

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.engine.engine import Engine
from ktqueue.engine.routing_recorder import MOST_SEGMENTS, SEGMENT, Choices, RecordsChoices, RoutingRecorder
from ktqueue.loading.load import LoadedModel
from ktqueue.loading.synthetic.routing import read_trace

log = logging.getLogger(__name__)


class RoutingFile:
    """The segments of `recorder`, added to `path` by `close`. Several workers may add to one file."""

    def __init__(self, path: Path, recorder: RoutingRecorder) -> None:
        self._path = path
        self._recorder = recorder

    def close(self) -> None:
        """Write the file. A second call does nothing."""
        segments, self._recorder.segments = self._recorder.segments, []
        if not segments:
            log.warning("%s: no sequence was long enough, so no routing is written", self._path)
            return
        try:
            count = add_segments(self._path, segments)
            log.info("%s has the routing of %d parts of sequences", self._path, count)
        except (OSError, CheckpointError) as error:
            log.error("routing is not written: %s", error)


def add_segments(path: Path, segments: Sequence[Choices]) -> int:
    """Add segments to a file, MOST_SEGMENTS in all. Returns how many it has. Raises OSError or CheckpointError."""
    lock = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = np.stack(segments)
        if path.exists():
            found = np.concatenate((_earlier(path, found.shape[2:]), found))
        found = found[:MOST_SEGMENTS]
        small = found.astype(np.uint8 if found.max() < 256 else np.uint16)
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as file:
            np.savez_compressed(file, routing=small)
        part.replace(path)
        return len(found)
    finally:
        os.close(lock)


def _earlier(path: Path, wanted: Sequence[int]) -> Choices:
    """The segments of a file. wanted: layers and chosen of this model. Raises CheckpointError."""
    arrays = read_trace(path)
    if len(arrays) != 1 or arrays[0].shape[1:] != (SEGMENT, *wanted):
        shapes = [list(array.shape) for array in arrays]
        raise CheckpointError(f"{path} has routing of {shapes}, not of [parts, {SEGMENT}, {wanted[0]}, {wanted[1]}]")
    return arrays[0]


def prepare_routing(config: EngineConfig, model: LoadedModel) -> None:
    """Let a loaded model record its routing, before its device is prepared. Raises ConfigError."""
    path, module = config.routing_file, model.module
    if path is None:
        return
    if config.drafts:
        raise _refused(path, "with engine.speculation the tokens of a sequence do not follow each other")
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise _refused(path, "its folder does not exist or cannot be written")
    if not isinstance(module, RecordsChoices):
        raise _refused(path, f"a {type(module).__name__} cannot say which experts it chose")
    try:
        module.record_choices(config.step_tokens)
        if Path(path).exists():
            _earlier(Path(path), module.choices(np.zeros(0, np.int64), 0).shape[1:])
    except (ValueError, CheckpointError) as error:
        raise _refused(path, str(error)) from error


def start_routing(config: EngineConfig, model: LoadedModel, engine: Engine) -> RoutingFile | None:
    """Record the routing of every generated token from now on; None if no file is set."""
    module = model.module
    if config.routing_file is None or not isinstance(module, RecordsChoices):
        return None
    engine.routing = RoutingRecorder(module)
    return RoutingFile(Path(config.routing_file), engine.routing)


def _refused(path: str, reason: str) -> ConfigError:
    return ConfigError(f"engine.routing_file {path}: {reason}", param="engine.routing_file", value=path)
