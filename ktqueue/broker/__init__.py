"""Floor 1: jobs, journals and leases, kept in Redis. Knows neither HTTP nor torch, and not what tokens mean."""
