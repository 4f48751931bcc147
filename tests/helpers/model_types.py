"""Types of the fixtures in tests/operators/conftest.py, and of operators' factories."""

from collections.abc import Callable
from typing import Any

from transformers import Qwen3MoeConfig

MakeConfig = Callable[..., Qwen3MoeConfig]
"""tiny_config(**changes)."""
MakeModel = Callable[..., Any]
"""tiny_model(paged=False, **changes) -> a Qwen3MoeForCausalLM, whose submodules are reached by attribute."""
