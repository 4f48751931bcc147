"""Exit codes of a worker process. This module imports nothing, because the supervisor must not load torch."""

DRAINED = 0  # it was asked to stop and has no job left
BROKEN = 1  # it failed; a new process may succeed
UNUSABLE = 2  # settings, model or rules are wrong, so a restart would not help
