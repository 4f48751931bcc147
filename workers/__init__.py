"""Floor 3: the processes that do the work. Knows everything below it, but neither the gateway's nor the CLI's code."""
