"""Fields that say how the prompt of a chat is made, whether the model reasons, and what of its reasoning is returned.

The names are those of vLLM, SGLang, llama.cpp, OpenRouter, Ollama and the model publishers' own servers.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ktqueue.core.request import MAX_TEMPLATE
from ktqueue.openai.common_fields import FreeObject
from ktqueue.openai.validation import StrictBody, must_be

EFFORTS = ("low", "medium", "high")


def _thinking(value: Any) -> Any:
    """A switch in one of the forms that servers have: true, "low", {"type": "enabled"}."""
    if isinstance(value, dict) and value.get("type") in ("enabled", "disabled", "adaptive", "auto"):
        return value["type"] != "disabled"
    if value is None or isinstance(value, bool) or value in EFFORTS:
        return value
    raise must_be('true, false, low, medium, high or {"type": "enabled" or "disabled"}', value)


Thinking = Annotated[bool | str | None, BeforeValidator(_thinking)]


class Reasoning(StrictBody):
    """How long the model reasons, as OpenAI and OpenRouter name it."""

    effort: str | None = Field(None, max_length=32)
    enabled: bool | None = None
    exclude: bool | None = Field(None, description="true: the reasoning is not returned.")


class ChatPromptFields(StrictBody):
    """Fields of the prompt and of reasoning."""

    chat_template: str | None = Field(
        None, min_length=1, max_length=MAX_TEMPLATE, description="Instead of the model's."
    )
    chat_template_kwargs: FreeObject | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: true, unless a message is continued.")
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")
    reasoning_effort: str | None = Field(None, max_length=32, description="Passed to the chat template.")
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = Field(None, description="Passed to the chat template.")
    thinking: Thinking = Field(None, description="Passed to the chat template.")
    think: Thinking = Field(None, description="The same as thinking.")
    force_think: bool | None = Field(None, description="The prompt ends inside the model's reasoning.")
    include_reasoning: bool | None = Field(None, description="false: reasoning is not returned.")
    separate_reasoning: bool | None = Field(None, description="false: reasoning is part of the content.")
    reasoning_format: Literal["none", "raw", "auto", "deepseek", "parsed", "hidden"] | None = Field(
        None, description="none or raw: reasoning is part of the content; hidden: it is not returned."
    )
    stream_reasoning: bool | None = Field(None, description="Changes nothing: a stream has reasoning as it is written.")

    def template_values(self) -> dict[str, Any]:
        """The values for the chat template. Those of chat_template_kwargs come first."""
        values = dict(self.chat_template_kwargs or {})
        enabled, inner_effort = (self.reasoning.enabled, self.reasoning.effort) if self.reasoning else (None, None)
        switches = (self.enable_thinking, self.thinking, self.think, enabled)
        switch = next((value for value in switches if value is not None), None)
        efforts = (self.reasoning_effort, inner_effort, switch if isinstance(switch, str) else None)
        effort = next((value for value in efforts if value is not None), None)
        if effort == "none" and switch is None:
            switch = False
        if effort is not None:
            values.setdefault("reasoning_effort", effort)
        if switch is not None:  # templates call it by one of these names
            values.setdefault("enable_thinking", bool(switch))
            values.setdefault("thinking", bool(switch))
        return values

    def reasoning_options(self) -> dict[str, bool]:
        """Reply options: see `choices`."""
        excluded = self.reasoning is not None and bool(self.reasoning.exclude)
        hidden = self.include_reasoning is False or excluded or self.reasoning_format == "hidden"
        raw = self.separate_reasoning is False or self.reasoning_format in ("none", "raw")
        return {name: True for name, value in (("hidden_reasoning", hidden), ("raw_reasoning", raw)) if value}

    @property
    def begins_message(self) -> bool:
        """Whether the prompt begins the assistant's message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt
