"""Journal events to choices: the new text and logprobs of each choice, in the order of its job's journal.

Text that waits for a slow client is joined to one delta. Logprobs wait for text, since a chunk with logprobs alone
would be an empty delta. Reasoning and tool calls are read from the text here. This module knows no HTTP and no JSON.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktqueue.answers.parser import Parser, make_parser
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined
from ktqueue.core.completion import JoinedPrompt
from ktqueue.core.events import FinishReason, PositionLogprobs, PromptPart, TokenEvent, TokenLogprob, Usage
from ktqueue.core.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Position:
    """One generated token with its logprobs. `token` is its text, `offset` the position of that text, in characters."""

    token: str
    offset: int
    logprobs: PositionLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a choice that is new since its last delta. `prompt`: all of it, in the first delta, if asked for.

    `text_positions`: the tokens of the answer's text, without those of reasoning and tool calls, each with the number
    of its run of text, from 0. Reasoning or a call that the client sees ends a run.
    """

    index: int
    first: bool
    parts: tuple[AnswerPart, ...]
    positions: tuple[Position, ...]
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] = ()
    prompt: PromptPart | None = None
    called: bool = False  # the choice has a tool call, now or before
    text_positions: tuple[tuple[int, Position], ...] = ()

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        return "".join(part.text for part in self.parts if isinstance(part, AnswerText))

    @property
    def reasoning(self) -> str:
        """What the model wrote for itself."""
        return "".join(part.text for part in self.parts if isinstance(part, AnswerReasoning))

    @property
    def tool_calls(self) -> list[AnswerToolCall]:
        """The tool calls of a whole answer, one entry each."""
        return [part for part in self.parts if isinstance(part, AnswerToolCall)]


def token_text(token: TokenLogprob) -> str:
    """The text of a single token. Half a character becomes the replacement character."""
    return token.token_bytes.decode("utf-8", errors="replace")


def parser_of(request: GenerationRequest, opening: str) -> Parser | None:
    """The parser of a request's answers; None if they are nothing but text."""
    options = request.reply_options
    reasoning = "" if options.get("raw_reasoning") else request.reasoning_parser
    return make_parser(request.tool_parser, reasoning, options.get("types", {}), opening)


class Choice:
    """One choice of a response: takes events and makes deltas.

    `request` says how its text is read. `prompt` is that of its job.
    """

    def __init__(self, index: int, request: GenerationRequest, prompt: JoinedPrompt) -> None:
        self.index = index
        self._prompt = prompt
        self._token_ids: list[int] = []
        self.started = False
        self.reasoning_tokens = 0
        self._request = request
        self._parser = parser_of(request, "")
        self._parts: list[AnswerPart] = []
        self._positions: list[Position] = []
        self._undecided: list[Position] = []  # perhaps of a tag, perhaps of text
        self._text_positions: list[tuple[int, Position]] = []
        self._run = -1  # of the last text
        self._run_is_open = False
        self._in_text: bool | None = None  # None: no part yet
        self._finish: FinishReason | None = None
        # Incremental, so that the texts of tokens that share a character add up to the exact text.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def open(self, opening: str) -> None:
        """Learn what of the answer the prompt already contains, before any event of this choice."""
        self._parser = parser_of(self._request, opening)

    def absorb(self, event: TokenEvent) -> None:
        """Add one event of this choice."""
        self._token_ids += event.token_ids
        parts: tuple[AnswerPart, ...] = (AnswerText(event.text),) if event.text else ()
        visible: Sequence[AnswerPart] = parts
        if self._parser is None:
            self._parts += parts
        else:
            was_reasoning = self._parser.is_reasoning
            parts = self._parser.push(event.text)
            if was_reasoning or any(isinstance(part, AnswerReasoning) for part in parts):
                self.reasoning_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                parts += self._parser.finish()
            is_hidden = self._request.reply_options.get("hidden_reasoning")
            visible = [part for part in parts if not (is_hidden and isinstance(part, AnswerReasoning))]
            self._parts += visible
        remaining = len(event.logprobs) if event.finish_reason is not None else 0
        for position in event.logprobs:
            remaining -= 1  # the last token also gets the replacement of an unfinished character
            token = self._decoder.decode(position.chosen.token_bytes, final=remaining == 0)
            self._positions.append(Position(token, self._offset, position))
            self._undecided.append(self._positions[-1])
            self._offset += len(token)
        self._decide(parts, visible, at_end=event.finish_reason is not None)
        if event.finish_reason is not None:
            self._finish = event.finish_reason

    def _decide(self, parts: Sequence[AnswerPart], visible: Sequence[AnswerPart], *, at_end: bool) -> None:
        """Say of the last tokens whether they are text. `parts`: what they made, and `visible` of it to the client."""
        first_run = None
        for part in visible:
            is_text = isinstance(part, AnswerText)
            if is_text and not self._run_is_open:
                self._run += 1
            if is_text and first_run is None:
                first_run = self._run
            self._run_is_open = is_text
        if parts:
            self._in_text = isinstance(parts[-1], AnswerText)
        if first_run is None and at_end and self._in_text:
            first_run = self._run
        if first_run is not None:
            self._text_positions += [(first_run, position) for position in self._undecided]
        if self._parser is not None and self._parser.is_reasoning:
            self._in_text = False
        if first_run is not None or self._in_text is False:
            self._undecided.clear()

    def delta(self) -> Delta | None:
        """The new part, or None if there is nothing to show yet."""
        if not self._parts and self._finish is None:
            return None
        delta = Delta(
            self.index,
            not self.started,
            joined(self._parts),
            tuple(self._positions),
            self._finish,
            tuple(self._token_ids),
            None if self.started else self._prompt.whole(),
            self._parser is not None and self._parser.called,
            tuple(self._text_positions),
        )
        self.started = True
        self._token_ids.clear()
        self._parts.clear()
        self._positions.clear()
        self._text_positions.clear()
        self._finish = None
        return delta


class Choices:
    """All choices of one HTTP response: n for each of its jobs, with the index job * n + choice.

    `request` is that of one of the jobs: they differ in their prompts only.
    """

    def __init__(self, jobs: int, request: GenerationRequest) -> None:
        self._n = request.sampling.n
        self._prompts = [JoinedPrompt() for _ in range(jobs)]
        self._choices = [Choice(index, request, self._prompts[index // self._n]) for index in range(jobs * self._n)]
        self._usage: dict[int, Usage] = {}

    def absorb(self, events: Iterable[tuple[int, TokenEvent]]) -> list[Delta]:
        """Add (place of the job, event) pairs. Returns one delta for each changed choice, oldest first."""
        touched: dict[int, Choice] = {}
        for place, event in events:
            if event.prompt is not None:
                self._prompts[place].add(event.prompt)
            if event.opening:
                for choice in self._choices[place * self._n : (place + 1) * self._n]:
                    choice.open(event.opening)
            if event.index < self._n:
                choice = self._choices[place * self._n + event.index]
                choice.absorb(event)
                touched[choice.index] = choice
            if event.usage is not None:
                self._usage[place] = event.usage
        deltas = (choice.delta() for choice in touched.values())
        return [delta for delta in deltas if delta is not None]

    def whole(self, events: Iterable[tuple[int, TokenEvent]]) -> list[Delta]:
        """Every choice, made from all events of all jobs, in the order of their indices."""
        deltas = {delta.index: delta for delta in self.absorb(events)}
        empty = (Delta(choice.index, True, (), (), None) for choice in self._choices)
        return [deltas.get(delta.index, delta) for delta in empty]

    def usage(self) -> Usage:
        """Token counts over all jobs that have ended, with the timings if there is only one job."""
        counts = self._usage.values()
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in counts),
            completion_tokens=sum(usage.completion_tokens for usage in counts),
            cached_tokens=sum(usage.cached_tokens for usage in counts),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
            timings=next(iter(counts)).timings if len(counts) == 1 else None,
        )
