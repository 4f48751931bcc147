"""Many readers of one gateway: a process that plays the workers, and processes of HTTP clients."""
