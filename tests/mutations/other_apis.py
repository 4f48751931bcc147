"""Mutations of promises about Anthropic's and Ollama's APIs."""

from mutation import Mutation

ANTHROPIC, OLLAMA = "tests/gateway/test_anthropic.py", "tests/gateway/test_ollama.py"

OTHER_APIS: dict[str, Mutation] = {
    "a stop sequence stays in the text": Mutation(
        "ktqueue/anthropic/reply.py",
        "            for stop in self._stops:\n",
        "            for stop in ():\n",
        (f"{ANTHROPIC}::test_the_stop_sequence_is_named_and_left_out",),
    ),
    "blocks overlap": Mutation(
        "ktqueue/anthropic/reply.py",
        "            yield from self._close()\n            self._open = opened\n",
        "            self._open = opened\n",
        (f"{ANTHROPIC}::test_thinking_text_and_tool_calls_are_blocks",),
    ),
    "one form of errors": Mutation(
        "ktqueue/gateway/endpoints.py",
        '    if path.startswith(("/v1/messages", "/messages")):\n',
        "    if False:\n",
        (f"{ANTHROPIC}::test_every_error_has_anthropics_form",),
    ),
    "heartbeats are lines": Mutation(
        "ktqueue/ollama/endpoints.py",
        'json_line, b" ", b"", error_body',
        'json_line, b"\\n", b"", error_body',
        (f"{OLLAMA}::test_a_failure_in_a_stream_is_the_last_line",),
    ),
    "pieces of tool calls for Ollama": Mutation(
        "ktqueue/ollama/reply.py",
        "                self._call.append(part)\n",
        "                yield self._line([part])\n",
        (f"{OLLAMA}::test_thinking_and_tool_calls",),
    ),
    "a context that is not there": Mutation(
        "ktqueue/ollama/bodies.py",
        "        self._check_context(card)\n",
        "        pass\n",
        (f"{OLLAMA}::test_a_context_that_is_too_large_is_refused",),
    ),
}
