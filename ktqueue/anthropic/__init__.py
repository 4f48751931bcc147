"""Anthropic's Messages API over the requests and answers of `ktqueue.openai`.

Source: https://docs.anthropic.com/en/api/messages and https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""
