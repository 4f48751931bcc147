"""Mutated GGUF files: the reader answers any bytes with a header or a CheckpointError, never anything else.

A short seeded run in `make test`; `make fuzz` goes on for FUZZ_SECONDS with another seed each time.
"""

import os
import random
import time
from pathlib import Path

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import open_checkpoint
from ktqueue.loading.gguf_header import read_header

CASES = 1_500
EXTREMES = (0, 1, 2, 3, 7, 8, 9, 12, 13, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


def mutate(raw: bytes, header: int, rng: random.Random) -> bytes:
    """A few changes of the first `header` bytes; now and then the file is cut."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(max(1, min(header, len(data))))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice((1, 4, 8))
            data[at : at + width] = (rng.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 4:
            start = rng.randrange(header)
            data[at:at] = raw[start : start + rng.randrange(1, 200)]
        else:
            del data[rng.randrange(1, len(data)) if rng.randrange(4) == 0 else len(data) :]
        if not data:
            break
    return bytes(data)


def test_any_bytes_are_a_header_or_a_checkpoint_error(tiny_gguf: Path, tmp_path: Path) -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "0"))
    seed = time.time_ns() if seconds else 1
    raw = tiny_gguf.read_bytes()
    header = min(tensor.offset for tensor in read_header(tiny_gguf).tensors)
    path = tmp_path / "mutated.gguf"
    end, case, read = time.monotonic() + seconds, 0, 0
    while case < CASES if not seconds else time.monotonic() < end:
        damaged = mutate(raw, header, random.Random(seed + case))
        path.write_bytes(damaged)
        try:
            read_header(path)
            read += 1
            checkpoint = open_checkpoint(str(path))
            del checkpoint
        except CheckpointError as error:
            assert "mutated.gguf" in str(error), seed + case
        except Exception as error:
            raise AssertionError(f"seed {seed + case}: {error!r}") from error
        case += 1
    assert 0 < read < case
