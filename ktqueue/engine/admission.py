"""Turns a prompt and sampling parameters into a request with its sequences, or rejects them.

Knows the limits of this engine, but nothing of pages or scheduling.
"""

import secrets
from collections.abc import Collection
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from ktqueue.answers.grammar import Matcher
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.prompt_size import check_tokens
from ktqueue.core.request import MAX_SEED, JobClass, SamplingParams
from ktqueue.core.tenants import Owner
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.detokenizer import Detokenizer, StopStrings
from ktqueue.engine.logit_edits import LogitEdits
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.engine.sequence import Request, Sequence


class Admission:
    """Checks requests: token ids, at most `max_model_len` tokens of prompt and completion, `max_num_seqs` choices."""

    def __init__(
        self, vocabulary: Vocabulary, *, max_model_len: int, max_num_seqs: int, page_size: int, original_length: int = 0
    ) -> None:
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._page_size = page_size
        self._original_length = original_length
        self._admitted = 0

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Many[int],
        sampling: SamplingParams,
        *,
        job_class: JobClass,
        arrival: float,
        emitted: Many[EmittedChoice],
        prompt_entries: int,
        bad_words: Many[Many[int]],
        matcher: Matcher | None,
        owner: Owner,
    ) -> Request:
        """Make a request with a sequence for each choice that has not finished. Emitted ids are not added yet.

        `matcher` is at the beginning of the grammar. Each choice gets a copy.

        Raises InvalidRequest or ContextLengthExceeded.
        """
        prompt = self._prompt(prompt_token_ids)
        if sampling.n > self._max_num_seqs:
            raise InvalidRequest.must_be(
                "n", f"at most {self._max_num_seqs} on this worker", sampling.n, limit=self._max_num_seqs
            )
        if len(emitted) > sampling.n:
            raise InvalidRequest(
                f"{len(emitted)} choices were emitted, but the request has n = {sampling.n}",
                param="emitted",
                limit=sampling.n,
                value=len(emitted),
            )
        self._ids("logit_bias", sampling.logit_bias)
        self._ids("allowed_token_ids", sampling.allowed_token_ids)
        for word in bad_words:
            self._ids("bad_words", word)
        for choice in emitted:
            self._ids("emitted", choice.token_ids)
        max_completion = self._max_model_len - len(prompt)
        # A grammar decides where the answer may end, so there `ignore_eos` only postpones the end: see TokenMasks.
        eos = frozenset() if sampling.ignore_eos and matcher is None else self._vocabulary.eos_token_ids
        self._admitted += 1
        request = Request(
            request_id,
            prompt,
            sampling,
            job_class=job_class,
            arrival=arrival,
            serial=self._admitted,
            seed=secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed,
            max_tokens=max_completion if sampling.max_tokens is None else min(max_completion, sampling.max_tokens),
            # Clients send the same `stop_token_ids` to any model. What it cannot draw ends nothing.
            end_ids=frozenset(token for token in (*eos, *sampling.stop_token_ids) if token < self._vocabulary.size),
            owner=owner,
        )
        stops = StopStrings(sampling.stop) if sampling.stop else None
        for index in range(sampling.n):
            if index < len(emitted) and emitted[index].finish_reason is not None:
                request.emitted_tokens += len(emitted[index].token_ids)
            else:
                request.sequences.append(
                    self._sequence(request, index, stops, bad_words, None if matcher is None else matcher.copy())
                )
        request.unfinished = len(request.sequences)
        request.prompt_entries = prompt_entries
        return request

    def _sequence(
        self,
        request: Request,
        index: int,
        stops: StopStrings | None,
        bad_words: Many[Many[int]],
        matcher: Matcher | None,
    ) -> Sequence:
        sampling, vocabulary = request.sampling, self._vocabulary
        edits = None
        if LogitEdits.needed(sampling):
            postponed = request.end_ids if matcher is None else ()  # with a grammar, its mask postpones the end
            edits = LogitEdits(sampling, request.prompt, postponed, vocabulary.size, bad_words)
        token_bytes = vocabulary.token_bytes if sampling.skip_special_tokens else vocabulary.special_token_bytes
        detokenizer = Detokenizer(token_bytes, stops, keeps_stop=sampling.include_stop_str_in_output)
        return Sequence(request, index, detokenizer, edits, self._page_size, matcher, self._original_length)

    def _prompt(self, ids: Many[int]) -> NDArray[np.int32]:
        if len(ids) == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt", limit=1, value=0)
        check_tokens(len(ids), self._max_model_len)
        return self._ids("prompt", ids)

    def _ids(self, param: str, ids: Collection[int]) -> NDArray[np.int32]:
        size = self._vocabulary.size
        array = np.fromiter(ids, dtype=np.int64, count=len(ids))
        wrong = array[(array < 0) | (array >= size)]
        if wrong.size:
            raise InvalidRequest(
                f"{param} has token id {wrong[0]}, but the vocabulary has ids 0 to {size - 1}",
                param=param,
                limit=size - 1,
                value=int(wrong[0]),
            )
        return array.astype(np.int32)
