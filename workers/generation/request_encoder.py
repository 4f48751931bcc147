"""RequestEncoder: what the engine needs of a request, computed in a thread: the prompt's tokens and the grammar.

Chat templates and grammars may take hours and all memory, so processes with limits work on them first.
"""

from dataclasses import replace

from ktqueue.answers.grammar import GrammarCompiler
from ktqueue.answers.grammar_process import GrammarProcesses
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.loading.tokenizer.template_process import TemplateProcesses
from ktqueue.loading.tokenizer.tokenizer import Tokenizer


class RequestEncoder:
    """Encodes requests for one model. Safe to call from several threads. `max_model_len` is in tokens."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._templates = None if tokenizer.template is None else TemplateProcesses(tokenizer.template)
        self._grammars = GrammarProcesses()
        # Not made for the first grammar only: with 150,000 tokens it takes a second, in which no step could run.
        self._compiler = GrammarCompiler(tokenizer, tokenizer.encode_plain)

    def start(self) -> None:
        """Start a process for the first chat, without waiting for it."""
        if self._templates is not None:
            self._templates.start()

    def __call__(self, request: GenerationRequest) -> EncodedPrompt:
        """The prompt of a request, with its grammar if it has one. Raises InvalidRequest that names the field."""
        render = None if self._templates is None else self._templates.render
        prompt = self._tokenizer.encode_request(request, max_model_len=self._max_model_len, render=render)
        if request.grammar is None:
            return prompt
        self._grammars.check(request.grammar)
        return replace(prompt, matcher=self._compiler.compile(request.grammar))

    def close(self) -> None:
        """End the processes."""
        self._grammars.close()
        if self._templates is not None:
            self._templates.close()
