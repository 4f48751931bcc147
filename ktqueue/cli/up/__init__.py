"""`ktqueue up`: start everything on this machine."""
