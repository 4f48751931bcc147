"""Floor 3: continuous batching of sequences through one model. Knows no asyncio, Redis or HTTP."""
