"""Floor 0: plain data, without Redis, torch or HTTP."""
