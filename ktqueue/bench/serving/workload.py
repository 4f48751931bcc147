"""Which requests a run sends, and when: random words, a file of prompts, or the arrivals and lengths of a trace."""

import json
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from ktqueue.bench.serving.traces import Arrival
from ktqueue.bench.serving.words import Words
from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import InvalidRequest

MAX_REQUESTS = 1_000_000
MADE_AHEAD_CHARACTERS = 64 << 20
CUSTOM_OUTPUT_TOKENS = 256
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048  # of a ShareGPT conversation, as in vLLM


class DatasetName(StrEnum):
    """Where prompts are from, by vLLM's names."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send `at` seconds after the start. `prompt_tokens` is what it should have."""

    at: float
    prompt: str
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths of random prompts, in tokens. Each is drawn between (1 - range_ratio) and (1 + range_ratio) times it."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0

    def draw(self, draw: random.Random) -> tuple[int, int]:
        """Draw an input length, without the prefix, and an output length."""
        return self._near(draw, self.input_len), self._near(draw, self.output_len)

    def _near(self, draw: random.Random, length: int) -> int:
        low, high = math.floor(length * (1 - self.range_ratio)), math.ceil(length * (1 + self.range_ratio))
        return max(1, draw.randint(low, high))


def arrivals(count: int, rate: float, burstiness: float, seed: str) -> "array[float]":
    """Seconds after the start at which `count` requests are sent, at `rate` a second.

    The gaps have a gamma distribution of this shape: 1 is a Poisson process, less is more bursty. They are scaled so
    that the last request comes after `count / rate` seconds. An infinite rate sends all at once.
    """
    if math.isinf(rate):
        return array("d", bytes(8 * count))
    draw = random.Random(f"{seed}:arrivals")
    moments, now = array("d"), 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0) if math.isfinite(burstiness) else 1.0
        moments.append(now)
    scale = count / rate / now
    return array("d", [moment * scale for moment in moments])


def random_requests(
    moments: Sequence[float], lengths: RandomLengths, words: Words, seed: str
) -> Iterator[PlannedRequest]:
    """Prompts of random words. All begin with the same prefix if it has a length, else no two share a beginning."""
    prefix = ""
    if lengths.prefix_len:
        prefix = words.text(random.Random(f"{seed}:prefix"), lengths.prefix_len, overhead=0) + " "
    for index, at in enumerate(moments):
        draw = random.Random(f"{seed}:{index}")
        tokens, max_tokens = lengths.draw(draw)
        yield PlannedRequest(at, prefix + words.text(draw, tokens), lengths.prefix_len + tokens, max_tokens)


def trace_requests(trace: Sequence[Arrival], speed: float, words: Words, seed: str) -> Iterator[PlannedRequest]:
    """Random prompts with the moments and lengths of a trace. Prompts share a block where the trace says so."""
    for index, arrival in enumerate(trace):
        draw = random.Random(f"{seed}:{index}")
        parts, left = [], arrival.input_tokens - words.overhead
        for block in arrival.blocks[: max(0, left - 1) // max(1, arrival.block_tokens)]:
            parts.append(words.text(random.Random(f"{seed}:block:{block}"), arrival.block_tokens, overhead=0))
            left -= arrival.block_tokens
        prompt = " ".join([*parts, words.text(draw, left, overhead=0)])
        yield PlannedRequest(arrival.seconds / speed, prompt, arrival.input_tokens, arrival.output_tokens)


def made_ahead(requests: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
    """Make the first requests now, up to MADE_AHEAD_CHARACTERS, so that making them takes no time from the run."""
    made, characters = [], 0
    for request in requests:
        made.append(request)
        characters += len(request.prompt)
        if characters > MADE_AHEAD_CHARACTERS:
            break
    return chain(made, requests)


def file_requests(
    moments: Sequence[float], samples: Sequence[tuple[str, int]], words: Words
) -> Iterator[PlannedRequest]:
    """Prompts and output lengths of a file, in order, from its beginning again when it ends."""
    for index, at in enumerate(moments):
        prompt, max_tokens = samples[index % len(samples)]
        yield PlannedRequest(at, prompt, words.tokens(prompt) + words.overhead, max_tokens)


def read_samples(
    name: DatasetName, path: Path, count: int, words: Words, seed: str, output_len: int | None = None
) -> list[tuple[str, int]]:
    """Read up to `count` prompts, with the tokens to generate. `output_len` replaces those of the file.

    Raises InvalidRequest naming the line, OSError.
    """
    samples = _sharegpt(path, count, words, seed, output_len) if name is DatasetName.SHAREGPT else []
    if name is DatasetName.CUSTOM:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and len(samples) < count:
                    samples.append(_custom(f"{path}:{number}", line, output_len))
    if not samples:
        raise InvalidRequest(f"{path}: has no usable prompt")
    return samples


def _custom(place: str, line: str, output_len: int | None) -> tuple[str, int]:
    """Read a line {"prompt": ..., "output_tokens": ...}."""
    try:
        value = loads(line)
    except CodecError as error:
        raise InvalidRequest(f"{place}: {error.message}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest(f'{place}: must be an object such as {{"prompt": "text"}}, got {line.strip()[:60]!r}')
    tokens = output_len if output_len is not None else value.get("output_tokens", CUSTOM_OUTPUT_TOKENS)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidRequest(f"{place}: output_tokens must be an integer of at least 1, got {tokens!r}")
    return prompt, tokens


def _sharegpt(path: Path, count: int, words: Words, seed: str, output_len: int | None) -> list[tuple[str, int]]:
    """The first question and the length of its answer, of conversations in random order that are not too long."""
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{path}: not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise InvalidRequest(f"{path}: must be a list of conversations")
    random.Random(f"{seed}:order").shuffle(conversations)
    samples: list[tuple[str, int]] = []
    for conversation in conversations:
        turns = _turns(conversation)
        if len(samples) == count or turns is None:
            continue
        prompt, tokens = turns[0], words.tokens(turns[0])
        max_tokens = output_len or words.tokens(turns[1])
        fits = LEAST_TOKENS <= tokens <= MOST_PROMPT_TOKENS and tokens + max_tokens <= MOST_TOKENS
        if fits and (output_len or max_tokens >= LEAST_TOKENS):
            samples.append((prompt, max_tokens))
    return samples


def _turns(conversation: Any) -> tuple[str, str] | None:
    """The texts of the first two turns, or None if there are none."""
    try:
        first, second = (turn["value"] for turn in conversation["conversations"][:2])
    except (KeyError, TypeError, ValueError):
        return None
    return (first, second) if isinstance(first, str) and isinstance(second, str) else None
