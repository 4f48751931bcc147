"""What drafts gain where a text repeats itself: `python -m benchmarks.engine.drafts --model M [--rows 1,4,16]`.

Two engines, one with drafts, answer in turns. They do not take their steps in turns, because a step of the other would
seem to be the host's time before a step, which is part of what drafts cost. The logits of each position are replaced by
those of a text with a known part of repeated tokens. The answers must be equal.
"""

import argparse
import random
import sys
import time
from typing import Any

import torch
from torch import nn

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import native
from ktqueue.operators.step import DecoderOutput
from ktqueue.workers.startup.step_probes import probe_drafts, probe_steps

PERIOD, PROMPT_TOKENS = 24, 30
OWN = 64  # token ids of a row, so that rows use different experts
CERTAIN = 1000.0  # added to the logit of the token
PAGE_SIZE = 16
POSITIONS = 1024


class ReplacedText:
    """Lets a model compute everything and then say a text, in which a part of the tokens repeat those before.

    The texts of `rows` rows are a table on `device`, [rows, POSITIONS] int64, which captured steps read too.
    """

    def __init__(self, model: nn.Module, rows: int, device: str = "cpu") -> None:
        self._texts = torch.zeros(rows, POSITIONS, dtype=torch.int64, device=device)
        self._forward = model.forward
        model.forward = self.forward

    def write(self, repeated: float, right: float | None = None) -> None:
        """Write texts in which `repeated` of the tokens repeat earlier ones.

        right: so many tokens are those of the text and the others are not, as a draft model would say it.
        """
        texts = [[_token(row, place, repeated) for place in range(POSITIONS)] for row in range(len(self._texts))]
        if right is not None:
            draw = random.Random(right)
            texts = [[token if draw.random() < right else token ^ 1 for token in text] for text in texts]
        self._texts.copy_(torch.tensor(texts))

    def prompt(self, row: int) -> list[int]:
        """The beginning of a row's text."""
        found: list[int] = self._texts[row, :PROMPT_TOKENS].tolist()
        return found

    def forward(
        self, *, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, position_ids: torch.Tensor, **more: Any
    ) -> DecoderOutput:
        logits: torch.Tensor = self._forward(
            input_ids=input_ids, logits_to_keep=logits_to_keep, position_ids=position_ids, **more
        ).logits
        rows = (input_ids[0, logits_to_keep] // OWN) % len(self._texts)
        tokens = self._texts[rows, (position_ids[0, logits_to_keep] + 1) % POSITIONS] % logits.shape[2]
        logits[0].scatter_add_(1, tokens[:, None], torch.full_like(logits[0, :, :1], CERTAIN))
        return DecoderOutput(logits)


def _token(row: int, position: int, repeated: float) -> int:
    draw = random.Random(f"{row} {position}")
    return row * OWN + (position % PERIOD if draw.random() < repeated else draw.randrange(PERIOD, OWN))


def measure(engine: Engine, text: ReplacedText, rows: int, tokens: int) -> tuple[float, dict[str, list[int]]]:
    """Tokens a second of an engine, from when all its rows have their first token, and its answers."""
    generated, seconds = 0, 0.0
    answers: dict[str, list[int]] = {}
    for row in range(rows):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.add(str(row), text.prompt(row), sampling)
    while engine.has_work:
        decodes = len(answers) == rows
        began = time.perf_counter()
        outputs = engine.step(lambda: True)
        if decodes:
            seconds += time.perf_counter() - began
            generated += sum(len(output.token_ids) for output in outputs)
        for output in outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return generated / seconds, answers


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
    counts = [int(rows) for rows in options.rows.split(",")]
    text = ReplacedText(model.module, max(counts))
    layout = model.kv_layout(PAGE_SIZE)
    engines = [
        Engine(model.module, vocabulary, layout, EngineConfig(speculation=way, max_num_seqs=16), 1000, 1000)
        for way in ("off", "lookup")
    ]
    for engine in engines:
        probe_steps(engine, vocabulary.size)
    probe_drafts(engines[1], vocabulary.size, EngineConfig().max_draft_tokens)
    for repeated in map(float, options.repeated.split(",")):
        text.write(repeated)
        for rows in counts:
            before = engines[1].stats()
            (off, answers), (lookup, others) = (measure(engine, text, rows, options.tokens) for engine in engines)
            if answers != others:
                raise SystemExit("drafts changed an answer")
            made = engines[1].stats().since(before)
            sys.stdout.write(
                f"{repeated:.0%} repeated, {rows} rows: {off:.1f} tok/s without drafts, {lookup:.1f} with, "
                f"{made.accepted_tokens} of {made.drafted_tokens} drafts were right\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
