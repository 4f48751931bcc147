"""Hashes of a prompt's beginning, which lead a job to a worker that has this prefix in its cache.

Two requests that share a hash share that many leading bytes: of the text, of the token ids, or of tools, template
settings and messages in the order in which a chat template writes them. This is only a hint, because only the engine
knows what its cache holds. Knows neither tokens nor Redis.
"""

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from ktqueue.core.codec import dumps
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import DEFAULT_TENANT

LENGTHS = tuple(1024 << step for step in range(7))  # bytes: 1 KiB to 64 KiB
DIGEST_BYTES = 8


def prefix_hashes(request: GenerationRequest, tenant: str = DEFAULT_TENANT) -> list[str]:
    """A hash in hexadecimal digits for each of LENGTHS that the prompt reaches, the shortest first.

    Those of another tenant differ, because tenants do not find each other's prefixes.
    """
    hashes: list[str] = []
    digest = blake2b(digest_size=DIGEST_BYTES, key=b"" if tenant == DEFAULT_TENANT else tenant.encode())
    done = 0
    for piece in _pieces(request):
        rest = memoryview(piece)
        while len(hashes) < len(LENGTHS) and done + len(rest) >= LENGTHS[len(hashes)]:
            count = LENGTHS[len(hashes)] - done
            digest.update(rest[:count])
            hashes.append(digest.hexdigest())
            rest, done = rest[count:], done + count
        if len(hashes) == len(LENGTHS):
            break
        digest.update(rest)
        done += len(rest)
    return hashes


def _pieces(request: GenerationRequest) -> Iterator[bytes]:
    """The leading bytes in pieces: at least LENGTHS[-1] bytes if the prompt has that many."""
    if request.prompt is not None:
        yield b"text" + request.prompt[: LENGTHS[-1]].encode()
    elif request.prompt_token_ids is not None:
        yield b"ids " + array("i", request.prompt_token_ids[: LENGTHS[-1]]).tobytes()
    else:
        yield b"chat" + dumps([request.tools, request.chat_template_kwargs])
        yield from (dumps(message) for message in request.messages or ())
