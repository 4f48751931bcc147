"""`ktqueue doctor`: check this machine."""
