"""AnswerParser: from the text of an answer to its parts, as it is written.

The result is a function of the text, however it is cut into pieces, so every reader of a journal gets the same parts.
Text that could be the beginning of a marker is held back until that is decided. Text is never lost: what looks like a
call and is none is text. White space around calls and reasoning belongs to their markers.
"""

from collections.abc import Iterable
from typing import Protocol

from ktqueue.answers.call_readers import CallReader, Emit, JsonReader, NamedReader, Types, first_mark, overlap
from ktqueue.answers.families import HARMONY, REASONING, TOOLS, ReasoningFormat, ToolFormat
from ktqueue.answers.gemma_reader import GemmaReader
from ktqueue.answers.harmony import HarmonyParser
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined
from ktqueue.answers.python_reader import PythonReader
from ktqueue.answers.xml_reader import XmlReader

TOOL_CALL = "<tool_call>"  # what follows it differs between families
FUNCTION = "<function="
INVOKE = 'invoke name="'
LINES = "<function_calls>"  # Python calls, one in a line
MAX_HEADER = 512  # characters before the arguments of a call; what has more is text


class Parser(Protocol):
    """Parses the text of one choice."""

    @property
    def called(self) -> bool:
        """Whether the answer has a tool call."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""

    def push(self, text: str) -> tuple[AnswerPart, ...]:
        """The new parts of the answer."""

    def finish(self) -> tuple[AnswerPart, ...]:
        """The parts that were held back until the end of the text. Call it once."""


def make_parser(tool_parser: str, reasoning_parser: str, types: Types, opening: str) -> Parser | None:
    """The parser for formats by name; None if the text has neither. An unknown name, of a newer version, has no effect.

    `opening`: the beginning of the answer that the prompt already contains. `types` as in `call_readers`.
    """
    if HARMONY in (tool_parser, reasoning_parser):
        return HarmonyParser(opening)
    reasoning, tools = REASONING.get(reasoning_parser), TOOLS.get(tool_parser)
    if reasoning is None and tools is None:
        return None
    return AnswerParser(reasoning, tools, types, opening)


class AnswerParser(Parser):
    """Parses one choice of a family in the tables. For the arguments see `make_parser`."""

    def __init__(
        self, reasoning: ReasoningFormat | None, tools: ToolFormat | None, types: Types, opening: str = ""
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools or ToolFormat()
        self._tag_ends = tuple(mark for mark in self._tools.ends if mark.startswith("<"))
        self._types = types
        self._buffer = ""
        self._parts: list[AnswerPart] = []
        self._calls = self._calls_before = 0  # all, and those before the present reader
        self._reader: CallReader | None = None
        self._call_marker: str | None = None  # of the present call, until its reader is known; "" if it has none
        self._marker_of_reader = ""
        self._header = ""  # what stood before the `inner` marker of the present call
        self._in_reasoning = reasoning is not None and reasoning.begun and not opening
        self._reasoned = False  # there was reasoning
        self._interrupted = False  # reasoning, by what may be a call
        self._said = False  # there was text
        self._at_edge = self._in_reasoning  # right behind a marker, where white space is dropped
        self._after_call = False  # nothing but white space has followed the last call
        self._space = ""  # at the end of what was said, until more follows
        self._dropped = ""  # the same, before the last marker
        if opening:
            self.push(opening)
            self._parts.clear()
            self._said = self._reasoned = False

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def is_reasoning(self) -> bool:
        return self._in_reasoning

    def push(self, text: str) -> tuple[AnswerPart, ...]:
        self._buffer += text
        while self._buffer and self._step(final=False):
            pass
        return self._take_parts()

    def finish(self) -> tuple[AnswerPart, ...]:
        while (self._buffer or self._call_marker is not None) and self._step(final=True):
            pass
        if self._reader is not None:
            self._end_call()
        if self._space:
            self._parts.append(AnswerReasoning(self._space) if self._in_reasoning else AnswerText(self._space))
        return self._take_parts()

    def _take_parts(self) -> tuple[AnswerPart, ...]:
        parts = joined(self._parts)
        self._parts = []
        return parts

    def _step(self, *, final: bool) -> bool:
        """Read a piece of the buffer. Returns whether another step may be possible."""
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._call_marker is not None:
            return self._recognise_call(self._call_marker, final=final)
        if self._in_reasoning:
            return self._read_reasoning(final=final)
        if self._after_call:
            return self._read_after_call(final=final)
        return self._read_text(final=final)

    # Reasoning and text

    def _read_reasoning(self, *, final: bool) -> bool:
        assert self._reasoning is not None
        start, end = self._reasoning.start, self._reasoning.end
        if not self._reasoned:  # some models repeat the marker that their prompt ends with
            text = self._buffer.lstrip()
            if text.startswith(start):
                self._buffer = text[len(start) :]
                self._at_edge = True
                return True
            if start.startswith(text) and not final:
                return False
        calls = (*self._tools.starts, *self._tools.sections) if not self._tools.heads else ()
        found = first_mark(self._buffer, (end, *calls))
        if found is None:
            return self._say_certain((end, *calls), final=final)
        place, marker = found
        self._say(self._buffer[:place])
        self._pass_marker(place, marker)
        self._in_reasoning = False
        if marker != end:  # a call ends reasoning, if it is one
            self._interrupted = True
            self._begin_list_or_call(marker)
        return True

    def _read_text(self, *, final: bool) -> bool:
        if (bare := self._begins_bare_call()) or bare is None:
            if bare:
                text = self._buffer.lstrip()
                self._dropped, self._space = self._space + self._buffer[: len(self._buffer) - len(text)], ""
                self._buffer, self._call_marker = text, ""
            return bool(bare) or (final and self._say_certain((), final=True))
        starts = (self._reasoning.start,) if self._reasoning is not None else ()
        wrappers = self._reasoning.wrappers if self._reasoning is not None else ()
        markers = (*starts, *wrappers, *self._tools.starts, *self._tools.sections)
        found = first_mark(self._buffer, markers)
        if found is None:
            return self._say_certain(markers, final=final)
        place, marker = found
        self._say(self._buffer[:place])
        self._pass_marker(place, marker)
        if marker in starts:
            self._in_reasoning = True
        elif marker not in wrappers:
            self._begin_list_or_call(marker)
        return True

    def _begin_list_or_call(self, marker: str) -> None:
        if marker in self._tools.sections:
            self._after_call = True
        else:
            head = self._tools.heads.get(marker, "")
            self._call_marker, self._buffer = marker.removesuffix(head), head + self._buffer

    def _read_after_call(self, *, final: bool) -> bool:
        """Behind a call, or the beginning of a list of calls: markers of its end, another call, or text."""
        self._buffer = self._buffer.lstrip()
        if (start := _begins_with(self._buffer, self._tools.starts)) and not self._tools.heads:
            self._buffer, self._after_call = self._buffer[len(start) :], False
            self._begin_list_or_call(start)
            return True
        markers = (*self._tools.ends, *self._tools.sections, *self._tools.starts)
        if marker := _begins_with(self._buffer, (*self._tools.ends, *self._tools.sections)):
            self._buffer = self._buffer[len(marker) :]
            return True
        if final and any(mark.startswith(self._buffer) for mark in self._tools.ends):
            self._buffer = ""  # `max_tokens` has cut the end of the call
        if not self._buffer or (not final and any(mark.startswith(self._buffer) for mark in markers)):
            return False
        self._after_call = False
        self._at_edge = True
        self._in_reasoning, self._interrupted = self._interrupted, False
        self._said = self._said and not (self._tools.bare_json or self._tools.bare_python)
        return True

    def _begins_bare_call(self) -> bool | None:
        """Whether a call without a marker begins here. None: only white space has been read."""
        if self._said or not (self._tools.bare_json or self._tools.bare_python):
            return False
        text = self._buffer.lstrip()
        first, behind = text[:1], text[1:].lstrip()[:1]
        if not first or (first == "[" and not behind):
            return None
        if first == "[":
            return self._tools.bare_python or (self._tools.bare_json and behind == "{")
        return first == "{" and self._tools.bare_json

    def _pass_marker(self, place: int, marker: str) -> None:
        self._buffer = self._buffer[place + len(marker) :]
        self._dropped, self._space = self._space, ""
        self._at_edge = True

    def _say_certain(self, markers: Iterable[str], *, final: bool) -> bool:
        """Pass on the buffer, without an end that may be the beginning of a marker."""
        possible = (marker for marker in markers if marker[:1] in self._buffer)  # few, in most text
        keep = 0 if final else max([overlap(self._buffer, marker) for marker in possible], default=0)
        ready = len(self._buffer) - keep
        self._say(self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _say(self, text: str) -> None:
        if self._at_edge:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._space += text
            return
        said = self._space + body
        self._parts.append(AnswerReasoning(said) if self._in_reasoning else AnswerText(said))
        self._space = text[len(body) :]
        self._at_edge = False
        self._said = self._said or not self._in_reasoning
        self._reasoned = self._reasoned or self._in_reasoning

    # Calls

    def _recognise_call(self, marker: str, *, final: bool) -> bool:
        """Choose the reader of a call by how it begins. Returns whether that could be decided."""
        text = self._buffer.lstrip()
        if (inner := self._tools.inner) and marker != inner:  # behind a header
            place = text.find(inner)
            if place < 0 and not final and len(text) <= MAX_HEADER:
                return False
            if 0 <= place <= MAX_HEADER:
                self._header = marker + self._buffer[: len(self._buffer) - len(text)] + text[:place]
                self._buffer, self._call_marker = text[place + len(inner) :], inner
            else:
                self._call_marker = None
                self._say_no_call(marker)
            return True
        ends = self._ends_of_name(marker, text)
        found = first_mark(text, ends)
        if ends and (found is None or found[0] > MAX_HEADER):
            if not final and len(text) <= MAX_HEADER + max(map(len, ends)):
                return False
            self._call_marker = None
            self._say_no_call(self._header + marker)
            return True
        behind = text[1:].lstrip()[:1] if text.startswith("[") else ""
        if text.startswith("[") and not behind and not final:
            return False
        name = text.removeprefix(FUNCTION) if marker == TOOL_CALL else text
        if found is not None and found[1].endswith("tool_call>"):
            name = self._buffer  # a word on its own line is no call without arguments
        self._marker_of_reader = self._header + marker + self._buffer[: len(self._buffer) - len(name)]
        self._calls_before = self._calls
        self._reader, self._call_marker, self._buffer = self._reader_of(marker, text, found), None, name
        return True

    def _ends_of_name(self, marker: str, text: str) -> tuple[str, ...]:
        """What ends the name that a call begins with. Empty: it begins with JSON or a list."""
        if tags := self._tools.tags:
            return (tags.name_end, tags.key_start, tags.end)
        if marker == FUNCTION or (marker == TOOL_CALL and text.startswith(FUNCTION)):
            return (">",)
        if marker.endswith(INVOKE):
            return ('">',)
        if marker == LINES or text.startswith(("{", "[")):
            return ()
        if marker.endswith("tool_call>"):
            prefix = _prefix_of(marker)
            return ("{", f"<{prefix}arg_key>", "<tool_sep>", f"</{prefix}tool_call>")
        return ("{", *self._tag_ends)

    def _reader_of(self, marker: str, text: str, name_end: tuple[int, str] | None) -> CallReader:
        """The reader for a call whose marker is followed by `text`."""
        if tags := self._tools.tags:
            return XmlReader(
                self._begin_call, self._types, name_end=tags.name_end, name_may_end_at=(tags.key_start, tags.end),
                key_start=tags.key_start, key_end=tags.key_end, value_end=tags.value_end, end=tags.end,
                cdata=tags.cdata,
            )  # fmt: skip
        if marker == FUNCTION or (marker == TOOL_CALL and text.startswith(FUNCTION)):
            return self._xml_reader("<", ">", "parameter=", "function")
        if marker.endswith(INVOKE):
            prefix = marker.removeprefix("<").removesuffix(INVOKE)
            return self._xml_reader(f"<{prefix}", '">', 'parameter name="', "invoke", closing=f"</{prefix}")
        if self._tools.quote:
            return GemmaReader(self._begin_call, self._tools.quote, self._tools.ends)
        if marker == LINES:
            return PythonReader(self._begin_call, end="</function_calls>")
        if text.startswith("["):
            is_json = text[1:].lstrip()[:1] in ("{", "]", "") and (marker or not self._tools.bare_python)
            return self._json_reader(marker) if is_json else PythonReader(self._begin_call)
        if text.startswith("{"):
            return self._json_reader(marker)
        # A name comes first. Then GLM-4.5 has pairs of keys and values, and other models have JSON.
        if not marker.endswith("tool_call>") or (name_end is not None and name_end[1] == "{"):
            return NamedReader(self._begin_call, self._tag_ends)
        prefix = _prefix_of(marker)
        separator = "<tool_sep>" if name_end is not None and name_end[1] == "<tool_sep>" else "\n"
        return XmlReader(
            self._begin_call, self._types, name_end=separator,
            name_may_end_at=(f"<{prefix}arg_key>", f"</{prefix}tool_call>"),
            key_start=f"<{prefix}arg_key>", key_end=f"<{prefix}arg_value>", value_end=f"</{prefix}arg_value>",
            end=f"</{prefix}tool_call>",
        )  # fmt: skip

    def _json_reader(self, marker: str) -> JsonReader:
        return JsonReader(self._begin_call, names_are_keys=marker == "<|tools_prefix|>")

    def _xml_reader(self, tag: str, name_end: str, parameter: str, outer: str, closing: str = "</") -> XmlReader:
        return XmlReader(
            self._begin_call, self._types, name_end=name_end, key_start=f"{tag}{parameter}", key_end=">",
            value_end=f"{closing}parameter>", end=f"{closing}{outer}>", closings=self._tools.ends,
        )  # fmt: skip

    def _begin_call(self) -> Emit:
        place = self._calls
        self._calls += 1

        def emit(name: str, arguments: str, call_id: str) -> None:
            self._parts.append(AnswerToolCall(place, name, arguments, call_id))

        return emit

    def _read_call(self, reader: CallReader) -> bool:
        used = reader.push(self._buffer)
        self._buffer = "" if used is None else self._buffer[used:]
        if used is None:
            return False
        self._end_call()
        return True

    def _end_call(self) -> None:
        """The call has ended, or the text has. What was no call is text."""
        assert self._reader is not None
        left = self._reader.finish()
        self._reader = None
        is_call = self._calls > self._calls_before
        self._after_call = is_call and not left
        if not self._after_call:
            self._say_no_call(left if is_call else self._marker_of_reader + left)
        else:
            self._interrupted, self._header = False, ""

    def _say_no_call(self, text: str) -> None:
        """What began like a call is text, with the white space around it; or reasoning, if that is where it began."""
        self._in_reasoning, self._interrupted = self._interrupted, False
        self._header = ""
        whole, self._dropped = self._dropped + text, ""
        self._parts.append(AnswerReasoning(whole) if self._in_reasoning else AnswerText(whole))
        self._said = self._said or not self._in_reasoning
        self._at_edge = False


def _prefix_of(marker: str) -> str:
    """What stands before the words of GLM's tags in the kin that has its own, such as `longcat_`."""
    return marker.removeprefix("<").removesuffix("tool_call>")


def _begins_with(text: str, markers: Iterable[str]) -> str:
    """The longest marker that `text` begins with; empty if there is none."""
    return max((mark for mark in markers if text.startswith(mark)), key=len, default="")
