"""The endpoints of Ollama's API that generate text."""

from collections.abc import Mapping
from dataclasses import replace
from time import time
from typing import Any

from ktqueue.core.codec import Json
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.model_card import ModelCard
from ktqueue.ollama.bodies import (
    CHAT_PATH,
    GENERATE_NAMES,
    GENERATE_PATH,
    OLLAMA_CHAT_NAMES,
    parse_ollama_chat,
    parse_ollama_generate,
)
from ktqueue.ollama.reply import OllamaChatReply, OllamaGenerateReply, timestamp
from ktqueue.openai.endpoint import Call, Endpoint
from ktqueue.openai.stream_format import StreamFormat, json_line


def error_body(info: ErrorInfo) -> Json:
    """The JSON body of an error."""
    return {"error": info.message}


class OllamaEndpoint(Endpoint):
    """An endpoint whose body may ask for nothing but a loaded model."""

    __slots__ = ()

    def parse_call(self, body: Mapping[str, Any], card: ModelCard | None) -> Call:
        """What a body asks for. A body without a prompt is answered at once. Raises InvalidRequest, ModelNotFound."""
        call = super().parse_call(body, card)
        if call.generations:
            return call
        empty = {"message": {"role": "assistant", "content": ""}} if self.path == CHAT_PATH else {"response": ""}
        head = {"model": body["model"], "created_at": timestamp(time())}
        reason = "unload" if body.get("keep_alive") in (0, "0") else "load"
        return replace(call, at_once={**head, **empty, "done": True, "done_reason": reason})


# A space before a line means nothing to a reader of JSON. An empty line would be an error for Ollama's package.
FORMAT = StreamFormat("application/x-ndjson", json_line, b" ", b"", error_body)
CHAT = OllamaEndpoint(CHAT_PATH, parse_ollama_chat, OllamaChatReply, "ollama", FORMAT, OLLAMA_CHAT_NAMES)
GENERATE = OllamaEndpoint(GENERATE_PATH, parse_ollama_generate, OllamaGenerateReply, "ollama", FORMAT, GENERATE_NAMES)
