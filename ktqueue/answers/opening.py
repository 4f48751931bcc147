"""The beginning of an answer that its prompt already contains, so that its readers start in the right state."""

from ktqueue.answers.families import REASONING

MAX_OPENING = 4096  # characters of a message that is continued


def opening_of(prompt: str, reasoning_parser: str, continued: str | None = None, reasoned: str = "") -> str:
    """The opening of the answer to a prompt, empty if the answer starts with it.

    A prompt may end inside reasoning (`<think>`), or with reasoning that is over (`<think></think>`). `continued` is
    the content of the message that the answer continues, None if it is a new one, and `reasoned` the reasoning of that
    message.
    """
    form = REASONING.get(reasoning_parser)
    if continued is not None:
        text = continued or (form.start + reasoned if form else "")
        if len(text) <= MAX_OPENING:
            return text
        is_reasoning = form is not None and text.rfind(form.start) > text.rfind(form.end)
        return (form.start if form and is_reasoning else "") + text[-MAX_OPENING:]
    if form is None:
        return ""
    end = prompt.rstrip()
    if end.endswith(form.start):
        return prompt[len(end) - len(form.start) :]
    if end.endswith(form.end):
        start = end.rfind(form.start)
        is_empty = start >= 0 and not end[start + len(form.start) : -len(form.end)].strip()
        return prompt[start if is_empty else len(end) - len(form.end) :]
    return ""


def begun_reasoning(prompt: str, reasoning_parser: str) -> str:
    """The prompt, which ends inside reasoning. A model without a known format of it gets `<think>`."""
    form = REASONING.get(reasoning_parser, REASONING["think"])
    return prompt if prompt.rstrip().endswith(form.start) else f"{prompt}{form.start}\n"
