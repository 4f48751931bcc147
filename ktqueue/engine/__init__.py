"""Floor 2: continuous batching of sequences through one model. Knows no asyncio, no Redis, no HTTP."""
