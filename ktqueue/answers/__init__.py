"""How models write reasoning and tool calls: reading them from text, and grammars that force them."""
