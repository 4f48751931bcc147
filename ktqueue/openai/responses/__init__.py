"""POST /v1/responses: its body as a chat body, and its answers. Source: OpenAI's API reference, Responses."""
