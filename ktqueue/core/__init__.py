"""Floor 0: plain data. Knows no Redis, no torch, no HTTP."""
