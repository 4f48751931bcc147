"""The processes that do the work. The supervisor starts the gateway by command; nothing here imports its modules."""
