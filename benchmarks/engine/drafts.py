"""What drafts gain where a text repeats itself: `python -m benchmarks.engine.drafts --model M [--rows 1,4,16]`.

Two engines, one with drafts, take their steps in turns, so that both see the same load of the machine. The logits of
each position are replaced by those of a text with a known part of repeated tokens. The answers must be equal.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import native
from ktqueue.workers.startup.step_probes import probe_steps

PERIOD, PROMPT_TOKENS = 24, 30
OWN = 64  # token ids of a row, so that rows use different experts
CERTAIN = 1000.0  # added to the logit of the token
PAGE_SIZE = 16


class ReplacedText:
    """A model that computes everything and then says a text, in which `repeated` of the tokens repeat those before."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.repeated = 0.0
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def token(self, row: int, position: int) -> int:
        """The token of a row's text at a position."""
        draw = random.Random(f"{row} {position}")
        return row * OWN + (position % PERIOD if draw.random() < self.repeated else draw.randrange(PERIOD, OWN))

    def __call__(
        self, *, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, position_ids: torch.Tensor, **more: Any
    ) -> Any:
        logits = self._model(
            input_ids=input_ids, logits_to_keep=logits_to_keep, position_ids=position_ids, **more
        ).logits
        for scored, place in enumerate(logits_to_keep.tolist()):
            row, position = int(input_ids[0, place]) // OWN, int(position_ids[0, place])
            logits[0, scored, self.token(row, position + 1) % logits.shape[2]] += CERTAIN
        return SimpleNamespace(logits=logits)


def measure(engines: list[Engine], text: ReplacedText, rows: int, tokens: int) -> list[float]:
    """Tokens a second of each engine, from when all its rows have their first token. Raises ValueError if answers
    differ.
    """
    generated, seconds = [0] * len(engines), [0.0] * len(engines)
    answers: list[dict[str, list[int]]] = [{} for _ in engines]
    for engine in engines:
        for row in range(rows):
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            engine.add(str(row), [text.token(row, place) for place in range(PROMPT_TOKENS)], sampling)
    while any(engine.has_work for engine in engines):
        for place, engine in enumerate(engines):
            decodes = len(answers[place]) == rows
            began = time.perf_counter()
            outputs = engine.step()
            if decodes:
                seconds[place] += time.perf_counter() - began
                generated[place] += sum(len(output.token_ids) for output in outputs)
            for output in outputs:
                answers[place].setdefault(output.request_id, []).extend(output.token_ids)
    if any(other != answers[0] for other in answers):
        raise ValueError("drafts changed an answer")
    return [count / elapsed for count, elapsed in zip(generated, seconds, strict=True)]


def main() -> None:
    """Measure each number of rows with each part of repeated tokens, and print what drafts gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--repeated", default="1,0.9,0.5,0", help="parts of the tokens that repeat earlier ones")
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    native.set_threads()
    native.set_batch_invariant(True)
    model, vocabulary = load_model(options.model), load_tokenizer(options.model)
    text = ReplacedText(model.module)
    configs = [EngineConfig(speculation="off", max_num_seqs=16), EngineConfig(speculation="lookup", max_num_seqs=16)]
    engines = [Engine(text, vocabulary, model.kv_layout(PAGE_SIZE), config, 1000, 1000) for config in configs]
    for engine in engines:
        probe_steps(engine, vocabulary.size)
    for text.repeated in map(float, options.repeated.split(",")):
        for rows in map(int, options.rows.split(",")):
            before = engines[1].stats()
            off, lookup = measure(engines, text, rows, options.tokens)
            made = engines[1].stats().since(before)
            sys.stdout.write(
                f"{text.repeated:.0%} repeated, {rows} rows: {off:.1f} tok/s without drafts, {lookup:.1f} with, "
                f"{made.accepted_tokens} of {made.drafted_tokens} drafts were right\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
