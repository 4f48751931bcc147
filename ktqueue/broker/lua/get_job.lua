-- One job. ARGV: id. Replies {fields and values, place in its queue or false}, or false. Writes nothing.
return describe(ARGV[1])
