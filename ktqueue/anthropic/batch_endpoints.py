"""All endpoints that lines of batches may name, in OpenAI's and Anthropic's forms."""

from collections.abc import Mapping

from ktqueue.anthropic.endpoints import MESSAGES
from ktqueue.openai.batch_endpoints import OPENAI_BATCH_ENDPOINTS, BatchEndpoint, batch_endpoint

BATCH_ENDPOINTS: Mapping[str, BatchEndpoint] = {**OPENAI_BATCH_ENDPOINTS, MESSAGES.path: batch_endpoint(MESSAGES)}
