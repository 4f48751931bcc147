"""`ktqueue demo`: a stream whose worker is killed, then a batch."""
