"""`ktqueue batch`: files of requests in, files of answers out."""
