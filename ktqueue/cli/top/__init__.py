"""`ktqueue top`: look at the queues and workers, again and again."""
