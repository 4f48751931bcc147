"""The processes of one machine: what `ktqueue up` starts, watches, restarts and stops."""
