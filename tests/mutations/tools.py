"""Mutations of promises about tool calls, reasoning and chat templates."""

from mutation import Mutation

GRAMMARS, TEMPLATES = "tests/answers/test_tool_grammar.py", "tests/loading/tokenizer/test_chat_template.py"

TOOLS: dict[str, Mutation] = {
    "several calls where one was asked for": Mutation(
        "ktqueue/answers/tool_grammar.py",
        "if several and style.many else",
        "if style.many else",
        (f"{GRAMMARS}::test_a_forced_call_is_read_as_it_was_written[tool_call]",),
    ),
    "a grammar ignores reasoning": Mutation(
        "ktqueue/answers/tool_grammar.py",
        "    if opening and not is_open:\n",
        "    if True:\n",
        (f"{GRAMMARS}::test_reasoning_comes_first",),
    ),
    "markers stay text": Mutation(
        "ktqueue/answers/tool_grammar.py",
        "        if marker not in special_tokens:\n",
        "        if True:\n",
        (f"{GRAMMARS}::test_markers_become_special_tokens_where_the_vocabulary_has_them",),
    ),
    "one spelling of tool calls": Mutation(
        "ktqueue/loading/tokenizer/chat_template.py",
        '    if any(message.get("tool_calls") for message in conversation.messages):\n',
        "    if False:\n",
        (f"{TEMPLATES}::test_tool_calls_are_spelled_as_the_template_expects[m.content is none-'' + f.arguments]",),
    ),
    "texts between tags have no limits": Mutation(
        "ktqueue/answers/tool_grammar.py",
        "elif inner.keys() & _LIMITS:",
        "elif False:",
        (f"{GRAMMARS}::test_texts_between_tags_keep_their_limits[limits0-right0-wrong0-qwen3_coder]",),
    ),
}
