-- The server's memory: {bytes used, bytes allowed (0 for no limit)}. Writes nothing.
return { memory() }
