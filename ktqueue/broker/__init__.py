"""Floor 1: jobs, journals and leases, kept in Redis. Knows no HTTP, no torch and no tokens' meaning."""
