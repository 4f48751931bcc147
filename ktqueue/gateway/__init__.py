"""Floor 3: HTTP to jobs, journals to SSE. Knows no torch, no tokenizer and no engine."""
