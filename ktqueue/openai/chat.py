"""POST /v1/chat/completions: its body to a GenerationRequest, and deltas to its answers.

Answers follow OpenAI's description 2.3.0: one id, created and model for a whole response; the role once per choice;
exactly one chunk per choice with a finish reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ktqueue.answers.families import has_special_markers
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import FinishReason, TokenLogprob, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import MAX_TOP_LOGPROBS, GenerationRequest
from ktqueue.openai.chat_prompt import ChatPromptFields
from ktqueue.openai.choices import Delta, Position
from ktqueue.openai.common_fields import MAX_ID, CommonFields
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.foreign_fields import translate
from ktqueue.openai.messages import MAX_MESSAGES, Message
from ktqueue.openai.prompt_reply import prompt_ids, prompt_logprobs
from ktqueue.openai.tool_calls import parameter_types, tool_call_delta, tool_calls_json
from ktqueue.openai.tool_choice import ToolFields, offer_tools, old_tools
from ktqueue.openai.validation import parse


class ChatBody(ChatPromptFields, ToolFields, CommonFields):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_ID, description="Preferred over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def request(self, card: ModelCard | None) -> GenerationRequest:
        """The request that this body asks for. `card`: of the model, if it is known. Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is allowed only with logprobs: true",
                param="top_logprobs",
                limit="logprobs: true",
                value=self.top_logprobs,
            )
        tools, choice = old_tools(self)
        answer = self.answer_grammar()
        tools_field = "functions" if self.has_old_functions else "tools"
        offered = offer_tools(
            tools,
            choice,
            card,
            parallel=self.parallel_tool_calls is not False and not self.has_old_functions,
            answer=answer,
            field=tools_field,
        )
        force_thinking = bool(card and card.force_thinking) if self.force_think is None else self.force_think
        reasoning_parser = (card.reasoning_parser if card else "") or ("think" if force_thinking else "")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return GenerationRequest(
            model=self.model,
            messages=tuple(message.plain() for message in self.messages),
            sampling=self.sampling(
                card,
                max_tokens=max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                special_tokens=has_special_markers(offered.parser, reasoning_parser),
            ),
            job_class=self.class_of_job(),
            priority=self.priority or 0,
            expires_in=self.expires_in,
            chat_template=self.chat_template,
            chat_template_kwargs=self.template_values(),
            add_generation_prompt=self.begins_message,
            continue_final_message=bool(self.continue_final_message),
            force_thinking=force_thinking,
            user=self.user,
            metadata=self.metadata or {},
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncation(card, max_tokens),
            return_prompt=bool(self.return_token_ids),
            grammar=offered.grammar,
            grammar_field=self.grammar_field if offered.grammar == answer else tools_field,
            reply_options=self._all_options(offered.tools),
            tools=offered.tools,
            tool_parser=offered.parser,
            reasoning_parser=reasoning_parser,
        )

    def _all_options(self, tools: Sequence[Json]) -> Json:
        options = {**self.reply_options(), **self.reasoning_options()}
        if types := parameter_types(tools):
            options["types"] = types
        if self.has_old_functions:
            options["old_functions"] = True
        return options

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """`request` as a tuple. Raises InvalidRequest."""
        return (self.request(card),)


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """A validated chat body. Raises InvalidRequest."""
    ours, names = translate(body, chat=True)
    if names.get("max_tokens") and ours["max_tokens"] in (-1, -2):
        del ours["max_tokens"]  # in llama.cpp "no limit" and "to the end of the context"; both are the default here
    return parse(ChatBody, ours, names)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Answers of POST /v1/chat/completions."""

    head: ReplyHead

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None, **more: Any
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish, **more}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self.head.body("chat.completion.chunk", [choice])

    def _logprobs(self, positions: Sequence[Position]) -> Json | None:
        if not self.head.logprobs or not positions:
            return None
        return {"content": [logprob_json(self.head, position) for position in positions], "refusal": None}

    def _ids(self, delta: Delta) -> Json:
        return {"token_ids": delta.token_ids} if self.head.wants("token_ids") else {}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The role first, then the parts of the answer, then the finish reason with logprobs that no chunk had.

        The content of the first chunk is null where a call comes first, as with OpenAI and in a whole answer.
        """
        if delta.first:
            begins_with_call = bool(delta.parts) and isinstance(delta.parts[0], AnswerToolCall)
            chunk = self._chunk(delta.index, {"role": "assistant", "content": None if begins_with_call else ""})
            yield {**chunk, **prompt_ids(self.head, delta.prompt)}
        logprobs, ids = self._logprobs(delta.positions), self._ids(delta)
        for part in delta.parts:
            yield self._chunk(delta.index, self._part(delta.index, part), logprobs, **ids)
            logprobs, ids = None, {}
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, {}, logprobs, self._finish_reason(delta), **ids)

    def _part(self, choice: int, part: AnswerPart) -> Json:
        if isinstance(part, AnswerText):
            return {"content": part.text}
        if isinstance(part, AnswerReasoning):
            return {"reasoning_content": part.text}
        if self.head.wants("old_functions"):
            name = {"name": part.name} if part.name else {}
            return {"function_call": {**name, "arguments": part.arguments}}
        return {"tool_calls": [tool_call_delta(choice, part, self.head.id)]}

    def _message(self, choice: Delta) -> Json:
        calls = tool_calls_json(choice, self.head.id)
        message: Json = {
            "role": "assistant",
            "content": (choice.text or None) if calls else choice.text,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls and self.head.wants("old_functions"):
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message

    def _finish_reason(self, choice: Delta) -> str | None:
        if choice.called and choice.finish_reason is FinishReason.STOP:
            return "function_call" if self.head.wants("old_functions") else "tool_calls"
        return choice.finish_reason

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """A chunk with token counts and no choices."""
        yield {**self.head.body("chat.completion.chunk", []), "usage": self.head.usage(usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The `chat.completion` object."""
        listed = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": (self._logprobs(choice.positions) or {"content": [], "refusal": None})
                if self.head.logprobs
                else None,
                "finish_reason": self._finish_reason(choice),
                **self._ids(choice),
            }
            for choice in choices
        ]
        prompt = choices[0].prompt
        more = {**prompt_ids(self.head, prompt), **prompt_logprobs(self.head, prompt)}
        return {**self.head.body("chat.completion", listed), "usage": self.head.usage(usage), **more}


def logprob_json(head: ReplyHead, position: Position) -> Json:
    """A generated token with its log probability and those of the likeliest tokens."""
    chosen, top = position.logprobs.chosen, position.logprobs.top
    return {
        **_chat_token(chosen, head.token_name(chosen, position.token)),
        "top_logprobs": [_chat_token(token, head.token_name(token)) for token in top],
    }


def _chat_token(token: TokenLogprob, text: str) -> Json:
    return {"token": text, "logprob": token.logprob, "bytes": list(token.token_bytes)}
