"""The work of one worker process: claim jobs under a lease, run the engine, commit tokens."""
