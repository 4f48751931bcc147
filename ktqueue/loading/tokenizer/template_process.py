"""Renders chat templates in separate processes, with limits of time and memory.

A template is a program that came with a model file: it may loop for hours or build a string of a terabyte. Such a
template costs one request, which is refused, and at most the process that rendered it.

This module is also a program (`python -m ktqueue.loading.tokenizer.template_process`). The first line on its standard
input is the template as JSON. Each further line is a conversation, answered by one line on standard output.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from ktqueue.core.codec import CodecError, dumps, loads
from ktqueue.core.errors import InvalidRequest, KtqueueError
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.tokenizer.chat_template import ChatTemplate

CPU_SECONDS = 1.0  # per rendering; real templates take milliseconds
WALL_SECONDS = 10.0  # per rendering, on a machine that is also busy with other work
START_SECONDS = 60.0
MEMORY_BYTES = 1 << 30  # of address space
MAX_REPLY_BYTES = 64 << 20


class TemplateFailed(KtqueueError):
    """The process could not be started."""


class TemplateProcesses:
    """One process per thread that renders at the same time. They are kept until `close`.

    `wall_seconds` limit one rendering.
    """

    def __init__(self, template: ChatTemplate, wall_seconds: float = WALL_SECONDS) -> None:
        self._wall_seconds = wall_seconds
        self._first_line = dumps({"source": template.source, "special": template.special}) + b"\n"
        self._idle: list[_TemplateProcess] = []
        self._gate = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start a process for the first request, without waiting for it."""
        self._idle.append(_TemplateProcess(self._first_line))

    def render(self, request: GenerationRequest) -> str:
        """Return the prompt text of a request with messages. Raises InvalidRequest, also if a limit is reached."""
        try:
            line = dumps([request.messages, request.tools, request.chat_template_kwargs]) + b"\n"
        except TypeError as error:
            raise InvalidRequest(f"the messages cannot be written as JSON: {error}", param="messages") from error
        with self._gate:
            process = self._idle.pop() if self._idle else None
        process = process or _TemplateProcess(self._first_line)
        try:
            process.start()
            return process.render(line, self._wall_seconds)
        finally:
            with self._gate:
                keep = process.alive and not self._closed
                if keep:
                    self._idle.append(process)
            if not keep:
                process.end()

    def close(self) -> None:
        """End all processes. One that is rendering ends when it finishes or reaches a limit."""
        with self._gate:
            self._closed = True
            processes, self._idle = self._idle, []
        for process in processes:
            process.end()


class _TemplateProcess:
    def __init__(self, first_line: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ktqueue.loading.tokenizer.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C must reach only the worker
        )
        self.alive = True
        self._first_line = first_line

    def start(self) -> None:
        """Wait until the process has compiled the template."""
        if self._first_line:
            try:
                self._ask(self._first_line, START_SECONDS)
            except _NoAnswer as error:
                self.alive = False
                raise TemplateFailed(f"the process that renders chat templates did not start: {error}") from error
            self._first_line = b""

    def render(self, line: bytes, wall_seconds: float) -> str:
        try:
            reply = loads(self._ask(line, wall_seconds))
        except (_NoAnswer, CodecError) as error:
            self.alive = False
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {error}",
                param="messages",
                limit=f"{wall_seconds:g} seconds, {MEMORY_BYTES >> 20} MiB",
            ) from None
        if "error" in reply:
            raise InvalidRequest(**reply["error"])
        text: str = reply["text"]
        return text

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _ask(self, line: bytes, seconds: float) -> bytes:
        """Send one line and return the answer. Raises _NoAnswer."""
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None
        assert source is not None
        deadline = time.monotonic() + seconds
        unsent, pieces, size = memoryview(line), [], 0
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(sink, select.POLLOUT)
        while True:
            wait = deadline - time.monotonic()
            if wait <= 0:
                raise _NoAnswer(f"it took more than {seconds:g} seconds")
            ready = dict(poll.poll(wait * 1_000))
            if unsent and sink.fileno() in ready:
                try:
                    unsent = unsent[os.write(sink.fileno(), unsent[: select.PIPE_BUF]) :]
                except BrokenPipeError:
                    raise _NoAnswer("its process ended") from None
                if not unsent:
                    poll.unregister(sink)
            if source.fileno() in ready:
                piece = os.read(source.fileno(), 1 << 16)
                size += len(piece)
                if not piece:
                    raise _NoAnswer("its process ended")
                if size > MAX_REPLY_BYTES:
                    raise _NoAnswer(f"it wrote more than {MAX_REPLY_BYTES >> 20} MiB")
                pieces.append(piece)
                if piece.endswith(b"\n"):
                    return b"".join(pieces)


class _NoAnswer(Exception):
    pass


class _Late(BaseException):
    """The time limit is reached. Not an Exception, so that a template's own handlers do not catch it."""


def _answer(template: ChatTemplate, line: bytes) -> bytes:
    error: dict[str, Any]
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, CPU_SECONDS)
        try:
            messages, tools, kwargs = loads(line)
            return dumps({"text": template.render(messages, tools, kwargs)})
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
    first = loads(lines.readline())
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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
