"""The same no-op jobs through several queues: what each needs for it. Only `ours` imports anything of ktqueue."""
