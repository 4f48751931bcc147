"""RequestEncoder: what the engine needs of a request, computed in a thread: the prompt's tokens and the grammar.

Chat templates and grammars may take hours and all memory, so processes with limits work on them first.
"""

from dataclasses import replace

from ktqueue.answers.grammar import GrammarCompiler
from ktqueue.answers.grammar_memory import DEFAULT_BYTES, GrammarMemory
from ktqueue.answers.grammar_process import GrammarProcesses
from ktqueue.answers.opening import begun_reasoning, opening_of
from ktqueue.answers.tool_grammar import after_reasoning, with_special_tokens
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.loading.tokenizer.template_process import TemplateProcesses
from ktqueue.loading.tokenizer.tokenizer import Tokenizer


class RequestEncoder:
    """Encodes requests for one model. Safe to call from several threads. `max_model_len` is in tokens.

    `grammar_bytes`: memory that the grammars of running answers may take.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, grammar_bytes: int = DEFAULT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._templates = TemplateProcesses(tokenizer.template)
        self._grammars = GrammarProcesses()
        # Not made for the first grammar only: with 150,000 tokens it takes 0.3 s, in which no step could run.
        self._compiler = GrammarCompiler(tokenizer, tokenizer.encode_plain, memory=GrammarMemory(grammar_bytes))
        self.has_room = self._compiler.has_room

    def start(self) -> None:
        """Start a process for the first chat, without waiting for it."""
        if self._tokenizer.template is not None:
            self._templates.start()

    def __call__(self, request: GenerationRequest) -> EncodedPrompt:
        """The prompt of a request, with its grammar if it has one. Raises InvalidRequest that names the field."""
        prompt = self._tokenizer.encode_request(request, max_model_len=self._max_model_len, render=self._render)
        if request.messages is not None and (request.tool_parser or request.reasoning_parser):
            prompt = replace(prompt, opening=_opening(request, prompt.text))
        if request.grammar is None:
            return prompt
        grammar = after_reasoning(request.grammar, request.reasoning_parser, prompt.opening)
        grammar = with_special_tokens(grammar, self._tokenizer.special_tokens)
        self._grammars.check(grammar, request.grammar_field)
        return replace(prompt, matcher=self._compiler.compile(grammar))

    def _render(self, request: GenerationRequest) -> str:
        if self._tokenizer.template is None and request.chat_template is None:
            return self._tokenizer.render(request)  # raises
        prompt = self._templates.render(request)
        return begun_reasoning(prompt, request.reasoning_parser) if request.force_thinking else prompt

    def close(self) -> None:
        """End the processes."""
        self._grammars.close()
        self._templates.close()


def _opening(request: GenerationRequest, prompt: str) -> str:
    if not request.continue_final_message:
        return opening_of(prompt, request.reasoning_parser)
    last = (request.messages or ({},))[-1]
    content = last.get("content")
    text = content if isinstance(content, str) else ""
    return opening_of(prompt, request.reasoning_parser, text, str(last.get("reasoning_content") or ""))
