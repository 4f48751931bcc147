"""The queue: jobs, streams, workers and hostile clients over Redis and HTTP."""
