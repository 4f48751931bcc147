"""`ktqueue bench`: how fast this machine, the expert kernels and an engine are."""
