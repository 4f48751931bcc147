"""Exit codes of a worker process, for those who start one. Light: imports nothing."""

DRAINED = 0  # told to stop, and left no job behind
BROKEN = 1  # a new process may do better
UNUSABLE = 2  # settings, model or rules are wrong: starting again won't help
