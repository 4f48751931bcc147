"""The processes that do the work. They start the gateway by its command and import none of its modules."""
