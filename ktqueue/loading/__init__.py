"""Loads a model and its tokenizer from files. Knows no request scheduling, no Redis and no HTTP."""
