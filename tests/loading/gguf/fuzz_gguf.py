"""Feeds mutated GGUF files to the reader: it answers any bytes with a header or a CheckpointError, never anything else.

fuzz_gguf.py FILE cases COUNT SEED      random mutations of FILE; prints how many still had a good header
fuzz_gguf.py FILE seconds COUNT FOLDER  the same mutations, kept if they reach something new in the reader (atheris);
                                        bytes that break it are left in FOLDER

A program of its own, since it limits its address space: a size in a header that is believed before it is checked ends
as a MemoryError here, not as a machine without memory.
"""

import random
import resource
import sys
import tempfile
from pathlib import Path

HEADROOM = 512 << 20  # bytes of address space beyond what is in use when the cases begin
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
            del data[rng.randrange(1, len(data)) if len(data) > 1 and rng.randrange(4) == 0 else len(data) :]
        if not data:
            break
    return bytes(data)


def limit_memory() -> None:
    """From here on the process has HEADROOM bytes of address space more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(file: str, unit: str, count: str, last: str) -> None:
    """Run the program; an exception ends it."""
    if unit == "seconds":
        import atheris

        with atheris.instrument_imports(include=["ktqueue.loading"]):
            from ktqueue.loading.gguf.header import read_header
            from ktqueue.loading.load import open_checkpoint
    else:
        from ktqueue.loading.gguf.header import read_header
        from ktqueue.loading.load import open_checkpoint
    from ktqueue.core.errors import CheckpointError

    raw = Path(file).read_bytes()
    header = min(tensor.offset for tensor in read_header(Path(file)).tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mutated.gguf")

        def good_header(data: bytes) -> bool:
            path.write_bytes(data)
            read = False
            try:
                read_header(path)
                read = True
                open_checkpoint(str(path))
            except CheckpointError as error:
                if "mutated.gguf" not in str(error):
                    raise AssertionError("an error that does not name the file") from error
            return read

        if unit == "seconds":

            def one_more(data: bytes, most: int, seed: int) -> bytes:
                return mutate(data or raw, header, random.Random(seed))[:most]

            corpus = Path(folder, "corpus")
            corpus.mkdir()
            (corpus / "whole").write_bytes(raw)
            options = [
                f"-max_total_time={count}",
                f"-max_len={2 * len(raw)}",
                f"-artifact_prefix={last}/",
                "-verbosity=0",
            ]
            atheris.Setup(
                [__file__, *options, str(corpus)], lambda data: good_header(data) and None, custom_mutator=one_more
            )
            limit_memory()
            atheris.Fuzz()
        limit_memory()
        good = sum(good_header(mutate(raw, header, random.Random(int(last) + case))) for case in range(int(count)))
        sys.stdout.write(f"{good}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
