"""Renders chat templates in separate processes, with limits of time and memory.

A template is a program that came with a model file: it may loop for hours or build a string of a terabyte. Such a
template costs one request, which is refused, and at most the process that rendered it.

This module is also a program (`python -m ktqueue.loading.tokenizer.template_process`). The first line on its standard
input is the template as JSON. Each further line is a conversation, answered by one line on standard output.
"""

import signal
import sys
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from ktqueue.core.codec import CodecError, dumps, loads
from ktqueue.core.errors import CheckpointError, InvalidRequest, KtqueueError
from ktqueue.core.line_process import MEMORY_BYTES, LineProcess, LineProcesses, NoAnswer, NotStarted, limit_process
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.tokenizer.chat_template import ChatTemplate

MODULE = "ktqueue.loading.tokenizer.template_process"
CPU_SECONDS = 1.0  # per rendering; real templates take milliseconds
WALL_SECONDS = 10.0  # per rendering, on a machine that is also busy with other work


class TemplateFailed(KtqueueError):
    """The process could not be started."""


class TemplateProcesses:
    """One process per thread that renders at the same time. They are kept until `close`.

    `template`: the model's own, if it has one. `wall_seconds` limit one rendering.
    """

    def __init__(self, template: ChatTemplate | None, wall_seconds: float = WALL_SECONDS) -> None:
        self._wall_seconds = wall_seconds
        source, special = (template.source, template.special) if template else ("", {})
        first_line = dumps({"source": source, "special": special}) + b"\n"
        self._processes = LineProcesses(lambda: LineProcess(MODULE, first_line))

    def start(self) -> None:
        """Start a process for the first request, without waiting for it."""
        self._processes.start()

    def render(self, request: GenerationRequest) -> str:
        """Return the prompt text of a request with messages. Raises InvalidRequest, also if a limit is reached."""
        try:
            line = dumps([request.chat_template, *render_arguments(request)]) + b"\n"
        except TypeError as error:
            raise InvalidRequest(f"the messages cannot be written as JSON: {error}", param="messages") from error
        try:
            reply = loads(self._processes.ask(line, self._wall_seconds))
        except NotStarted as error:
            raise TemplateFailed(f"the process that renders chat templates did not start: {error}") from error
        except (NoAnswer, CodecError) as error:
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {error}",
                param="messages",
                limit=f"{self._wall_seconds:g} seconds, {MEMORY_BYTES >> 20} MiB",
            ) from None
        if "error" in reply:
            raise InvalidRequest(**reply["error"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End all processes. One that is rendering ends when it finishes or reaches a limit."""
        self._processes.close()


def render_arguments(request: GenerationRequest) -> tuple[Any, Any, Any, dict[str, bool]]:
    """The arguments of `ChatTemplate.render` for a request: the last are by keyword."""
    options = {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    return request.messages, request.tools, request.chat_template_kwargs, options


def other_template(template: ChatTemplate | None, source: str) -> ChatTemplate:
    """The template of a request, with the special tokens of the model's own, if there is one. Raises InvalidRequest."""
    try:
        return ChatTemplate(source, template.special if template else {}, "the request")
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="chat_template") from error


class _Late(BaseException):
    """The time limit is reached. Not an Exception, so that a template's own handlers do not catch it."""


def _answer(template: ChatTemplate, line: bytes) -> bytes:
    error: dict[str, Any]
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, CPU_SECONDS)
        try:
            source, messages, tools, kwargs, options = loads(line)
            if source is not None:
                template = other_template(template, source)
            return dumps({"text": template.render(messages, tools, kwargs, **options)})
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Late:
        error = {
            "message": f"the model's chat template took more than {CPU_SECONDS:g} seconds of CPU time",
            "param": "messages",
            "limit": CPU_SECONDS,
        }
    except MemoryError:
        error = {
            "message": f"the model's chat template took more than {MEMORY_BYTES >> 20} MiB",
            "param": "messages",
            "limit": MEMORY_BYTES,
        }
    except KtqueueError as refusal:
        error = {
            "message": refusal.message, "param": refusal.param, "limit": refusal.limit, "value": refusal.value,
        }  # fmt: skip
    except Exception as fault:  # such as a text that is not UTF-8
        error = {"message": f"the model's chat template failed: {type(fault).__name__}", "param": "messages"}
    return dumps({"error": error})


def _serve(lines: BinaryIO, answers: BinaryIO) -> None:
    line = lines.readline()
    if not line:  # the process that started this one has ended without a question
        return
    first = loads(line)
    template = ChatTemplate(first["source"], first["special"], "the model")
    answer = b"{}"
    while True:
        answers.write(answer + b"\n")
        answers.flush()
        line = lines.readline()
        if not line:
            return
        try:
            answer = _answer(template, line)
        except _Late:  # the limit was reached just after the answer
            answer = dumps({"error": {"message": "the model's chat template took too long", "param": "messages"}})


def main() -> None:
    """Render until standard input ends."""

    def late(_: int, __: FrameType | None) -> NoReturn:
        raise _Late

    signal.signal(signal.SIGVTALRM, late)
    limit_process()
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
