"""Compares edits of logits with a plain reference."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ktqueue.core.request import SamplingParams
from ktqueue.engine.logit_edits import LogitEdits, edit, flat_edits

VOCAB = 50


def reference(logits: Any, sampling: Any, prompt: Any, output: Any, end_ids: Any, bad_words: Any) -> Any:
    row = [float(value) for value in logits]
    for token in range(VOCAB):
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            row[token] = -np.inf
    for *beginning, last in bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            row[last] = -np.inf
    for token, bias in sampling.logit_bias.items():
        row[token] = float(np.float32(row[token]) + np.float32(bias))
    if len(output) < sampling.min_tokens:
        for token in end_ids:
            if token < VOCAB:
                row[token] = -np.inf
    counts = Counter(output)
    for token in range(VOCAB):
        if token in counts or token in prompt:
            rate = sampling.repetition_penalty
            row[token] = row[token] / rate if row[token] > 0 else row[token] * rate
        row[token] -= sampling.frequency_penalty * counts[token]
        row[token] -= sampling.presence_penalty * (counts[token] > 0)
    return row


def test_results_equal_the_reference() -> None:
    noise = np.random.default_rng(0)
    for _ in range(30):
        logits = noise.normal(size=(6, VOCAB)).astype(np.float32) * 5
        cases = []
        for _ in range(4):
            sampling = SamplingParams(
                repetition_penalty=float(noise.choice([1.0, 1.3, 0.7])),
                frequency_penalty=float(noise.choice([0.0, 0.5, -1.0])),
                presence_penalty=float(noise.choice([0.0, 0.25, -2.0])),
                min_tokens=int(noise.choice([0, 3, 100])),
                logit_bias={int(i): float(noise.normal()) for i in noise.integers(0, VOCAB, noise.integers(0, 5))},
                allowed_token_ids=tuple(noise.integers(0, VOCAB, noise.choice([0, 0, 9])).tolist()),
                bad_words=("not read here",),
            )
            prompt = noise.integers(0, VOCAB, noise.integers(1, 20)).astype(np.int32)
            output = noise.integers(0, VOCAB, noise.integers(0, 90)).tolist()
            end_ids = {7, 49, VOCAB + 3}
            words = [[*output[-3:], 11], [*output[-1:], 12], [13], [output[-1] if output else 0, 14, 15], [16] * 4]
            edits = LogitEdits(sampling, prompt, end_ids, VOCAB, words)
            for token in output:
                edits.observe(token)
            cases.append((edits, (sampling, set(prompt.tolist()), output, end_ids, words)))
        found = logits.copy()
        rows = [4, 0, 5, 2]
        edit(found, flat_edits(rows, [case[0] for case in cases]))
        for row, (_, case) in zip(rows, cases, strict=True):
            assert found[row] == pytest.approx(reference(logits[row], *case), rel=1e-5, abs=1e-5)
        assert (found[[1, 3]] == logits[[1, 3]]).all()


def test_edits_are_made_only_if_a_parameter_needs_them() -> None:
    assert not LogitEdits.needed(SamplingParams(temperature=0.3, top_k=4, top_p=0.2, stop=("x",), seed=1))
    for sampling in (
        SamplingParams(min_tokens=1),
        SamplingParams(logit_bias={1: 0.5}),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(bad_words=("x",)),
        SamplingParams(allowed_token_ids=(0,)),
    ):
        assert LogitEdits.needed(sampling)


def test_end_tokens_are_masked_until_min_tokens() -> None:
    edits = LogitEdits(SamplingParams(min_tokens=2), np.array([1], dtype=np.int32), {3, 5}, VOCAB)
    for _ in range(2):
        assert edits.masked_ids.tolist() == [3, 5]
        edits.observe(9)
    assert edits.masked_ids.tolist() == []
