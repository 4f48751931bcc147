"""`ktqueue chat`: the conversation, its commands, and who answers."""
