"""Ollama's API over the requests and answers of `ktqueue.openai`.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""
