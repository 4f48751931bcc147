"""The endpoints of Anthropic's API, and those that lines of batches may name, in its forms and OpenAI's."""

from collections.abc import Mapping

from ktqueue.anthropic.errors import error_body
from ktqueue.anthropic.messages import NAMES, PATH, parse_count, parse_messages
from ktqueue.anthropic.reply import MessageReply
from ktqueue.openai.batch_endpoints import OPENAI_BATCH_ENDPOINTS, BatchEndpoint, batch_endpoint
from ktqueue.openai.endpoint import Endpoint
from ktqueue.openai.prompt_endpoints import PromptEndpoint
from ktqueue.openai.stream_format import StreamFormat, named_event

FORMAT = StreamFormat("text/event-stream", named_event, named_event({"type": "ping"}), b"", error_body)
MESSAGES = Endpoint(PATH, parse_messages, MessageReply, "msg", FORMAT, NAMES)
COUNT_TOKENS = PromptEndpoint(f"{PATH}/count_tokens", parse_count, NAMES)
BATCH_ENDPOINTS: Mapping[str, BatchEndpoint] = {**OPENAI_BATCH_ENDPOINTS, MESSAGES.path: batch_endpoint(MESSAGES)}
