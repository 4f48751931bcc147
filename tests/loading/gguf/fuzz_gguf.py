"""Feeds mutated GGUF files to the reader, which must answer any bytes with a header or a CheckpointError.

fuzz_gguf.py FILE cases COUNT SEED      random mutations of FILE; prints how many still had a good header
fuzz_gguf.py FILE seconds COUNT FOLDER  the same mutations, kept if they reach new code in the reader (atheris);
                                        bytes that break it are left in FOLDER

It is a separate program because it limits its address space: if the reader believes a size in a header before it is
checked, that is a MemoryError here, and the machine keeps its memory.
"""

import random
import resource
import sys
import tempfile
from pathlib import Path

HEADROOM = 512 << 20  # bytes of address space beyond those in use at the start
EXTREMES = (0, 1, 2, 3, 7, 8, 9, 12, 13, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


def mutate(raw: bytes, header_bytes: int, draw: random.Random) -> bytes:
    """Change the first `header_bytes` bytes in a few places; sometimes truncate the file."""
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        position = draw.randrange(max(1, min(header_bytes, len(data))))
        kind = draw.randrange(6)
        if kind == 0:
            data[position] ^= 1 << draw.randrange(8)
        elif kind == 1:
            width = draw.choice((1, 4, 8))
            data[position : position + width] = (draw.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del data[position : position + draw.randrange(1, 40)]
        elif kind == 3:
            data[position:position] = draw.randbytes(draw.randrange(1, 40))
        elif kind == 4:
            start = draw.randrange(header_bytes)
            data[position:position] = raw[start : start + draw.randrange(1, 200)]
        else:
            del data[draw.randrange(1, len(data)) if len(data) > 1 and draw.randrange(4) == 0 else len(data) :]
        if not data:
            break
    return bytes(data)


def limit_memory() -> None:
    """Limit the address space of the process to its current size plus HEADROOM bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(file: str, unit: str, count: str, seed_or_folder: str) -> None:
    """Run the program. An exception ends it."""
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
    header_bytes = min(tensor.offset for tensor in read_header(Path(file)).tensors)
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
                    raise AssertionError("the error does not name the file") from error
            return read

        if unit == "seconds":

            def one_more(data: bytes, most: int, seed: int) -> bytes:
                return mutate(data or raw, header_bytes, random.Random(seed))[:most]

            corpus = Path(folder, "corpus")
            corpus.mkdir()
            (corpus / "whole").write_bytes(raw)
            options = [
                f"-max_total_time={count}",
                f"-max_len={2 * len(raw)}",
                f"-artifact_prefix={seed_or_folder}/",
                "-verbosity=0",
            ]
            atheris.Setup(
                [__file__, *options, str(corpus)], lambda data: good_header(data) and None, custom_mutator=one_more
            )
            limit_memory()
            atheris.Fuzz()
        limit_memory()
        good = sum(
            good_header(mutate(raw, header_bytes, random.Random(int(seed_or_folder) + case)))
            for case in range(int(count))
        )
        sys.stdout.write(f"{good}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
