"""Floor 2: model files to a ready module and tokenizer. Knows no request scheduling, no Redis, no HTTP."""
