"""Names of what a prompt begins with, so that a job can go where that was read before. Knows no tokens, no Redis.

Two requests that share a name share so many leading bytes: of the text, of the token ids, or of tools, template
settings and messages in this order, as a chat template writes them. A hint, never a proof: what a worker keeps in its
cache only its engine knows.
"""

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from ktqueue.core.codec import dumps
from ktqueue.core.request import GenerationRequest

LENGTHS = tuple(1024 << step for step in range(7))  # bytes: 1 KiB to 64 KiB
DIGEST_BYTES = 8


def prefix_names(request: GenerationRequest) -> list[str]:
    """A name for each of LENGTHS that the prompt reaches, the shortest first: hexadecimal digits."""
    names: list[str] = []
    digest = blake2b(digest_size=DIGEST_BYTES)
    done = 0
    for piece in _pieces(request):
        rest = memoryview(piece)
        while len(names) < len(LENGTHS) and done + len(rest) >= LENGTHS[len(names)]:
            count = LENGTHS[len(names)] - done
            digest.update(rest[:count])
            names.append(digest.hexdigest())
            rest, done = rest[count:], done + count
        if len(names) == len(LENGTHS):
            break
        digest.update(rest)
        done += len(rest)
    return names


def _pieces(request: GenerationRequest) -> Iterator[bytes]:
    """The leading bytes, in pieces, at least LENGTHS[-1] of them if there are so many."""
    if request.prompt is not None:
        yield b"text" + request.prompt[: LENGTHS[-1]].encode()
    elif request.prompt_token_ids is not None:
        yield b"ids " + array("i", request.prompt_token_ids[: LENGTHS[-1]]).tobytes()
    else:
        yield b"chat" + dumps([request.tools, request.chat_template_kwargs])
        yield from (dumps(message) for message in request.messages or ())
