"""Processes: what `ktqueue up` starts, watches and restarts."""
