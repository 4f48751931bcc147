"""Everything below the routes: connections, limits, keys, bodies, headers, server-sent events. Knows no jobs."""
