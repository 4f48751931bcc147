"""POST /v1/tokenize, /v1/detokenize and /v1/apply-template: their bodies to requests for prompts, and their answers.

Bodies and answers are those of vLLM and of llama.cpp. Sources: vllm/entrypoints/serve/tokenize/protocol.py of vLLM,
tools/server/README.md of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation

from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import PromptPart
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, are_token_ids
from ktqueue.openai.chat import parse_chat
from ktqueue.openai.client_names import Names
from ktqueue.openai.validation import StrictBody, must_be, parse


def _token_ids(value: Any) -> Any:
    if not isinstance(value, list) or (value and not are_token_ids(value)):
        raise must_be("a list of token ids", value)
    return value


class TokenizeBody(StrictBody):
    """The body of POST /v1/tokenize for a text. With `messages` it is a chat body instead."""

    model: str = Field(min_length=1, max_length=256)
    prompt: str | None = Field(None, min_length=1)
    content: str | None = Field(None, description="llama.cpp's name of prompt.")
    add_special_tokens: bool = Field(True, description="Of prompt: whether the tokenizer adds tokens of its own.")
    add_special: bool = Field(False, description="The same, of content.")
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(StrictBody):
    """The body of POST /v1/detokenize."""

    model: str = Field(min_length=1, max_length=256)
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], SkipValidation, BeforeValidator(_token_ids)]


@dataclass(frozen=True, slots=True)
class PromptCall:
    """What a body asks for: the request whose prompt is needed, None if it is empty, and what to answer with it."""

    generation: GenerationRequest | None
    answer: Callable[[PromptPart], Json]


@dataclass(frozen=True, slots=True)
class PromptEndpoint:
    """One endpoint that answers with a prompt.

    `parse` takes a body and the card of its model, if that is known. `names` are the client's names of fields.
    """

    path: str
    parse: Callable[[Mapping[str, Any], ModelCard | None], PromptCall]
    names: Names = ()


def parse_tokenize(body: Mapping[str, Any], card: ModelCard | None) -> PromptCall:
    """A text or messages to their token ids. Raises InvalidRequest."""
    max_model_len = None if card is None else card.max_model_len
    if body.get("messages") is not None:
        wants_strings = body.get("return_token_strs") is True
        chat = replace(parse_chat(body).request(card), return_pieces=wants_strings)
        return PromptCall(chat, lambda prompt: _tokens(prompt, max_model_len, wants_strings))
    parsed = parse(TokenizeBody, body)
    if (parsed.prompt is None) == (parsed.content is None):
        raise InvalidRequest("exactly one of prompt, messages and content must be given", param="prompt")
    is_vllm = parsed.prompt is not None
    text = parsed.prompt if is_vllm else parsed.content
    wants_pieces = bool(parsed.return_token_strs if is_vllm else parsed.with_pieces)
    generation = GenerationRequest(
        model=parsed.model,
        prompt=text,
        add_special_tokens=parsed.add_special_tokens if is_vllm else parsed.add_special,
        return_pieces=wants_pieces,
    ) if text else None  # fmt: skip
    if is_vllm:
        return PromptCall(generation, lambda prompt: _tokens(prompt, max_model_len, wants_pieces))
    return PromptCall(generation, lambda prompt: {"tokens": _pieces(prompt) if wants_pieces else prompt.token_ids})


def parse_detokenize(body: Mapping[str, Any], card: ModelCard | None) -> PromptCall:
    """Token ids to their text, in which special tokens are spelled out. Raises InvalidRequest."""
    parsed = parse(DetokenizeBody, body)
    ids = tuple(parsed.tokens)
    generation = GenerationRequest(model=parsed.model, prompt_token_ids=ids) if ids else None
    return PromptCall(generation, lambda prompt: {"prompt": prompt.text, "content": prompt.text})


def parse_apply_template(body: Mapping[str, Any], card: ModelCard | None) -> PromptCall:
    """Messages to the text that the chat template makes of them. Raises InvalidRequest."""
    return PromptCall(parse_chat(body).request(card), lambda prompt: {"prompt": prompt.text})


def _tokens(prompt: PromptPart, max_model_len: int | None, with_strings: bool) -> Json:
    """vLLM's answer."""
    strings = [piece.decode(errors="replace") for piece in prompt.pieces] if with_strings else None
    return {
        "count": len(prompt.token_ids),
        "max_model_len": max_model_len,
        "tokens": prompt.token_ids,
        "token_strs": strings,
    }


def _pieces(prompt: PromptPart) -> list[Json]:
    """llama.cpp's tokens with pieces: texts, or lists of bytes where they are no whole characters."""
    pieces: list[Json] = []
    for token_id, data in zip(prompt.token_ids, prompt.pieces, strict=True):
        try:
            pieces.append({"id": token_id, "piece": data.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token_id, "piece": list(data)})
    return pieces


PROMPT_ENDPOINTS = (
    PromptEndpoint("/v1/tokenize", parse_tokenize),
    PromptEndpoint("/v1/detokenize", parse_detokenize, (("prompt_token_ids", "tokens"),)),
    PromptEndpoint("/v1/apply-template", parse_apply_template),
)
