"""Connections to Redis: addresses, servers, failover, subscriptions. Knows no keys and no scripts."""
