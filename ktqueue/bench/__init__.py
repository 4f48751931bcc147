"""Floor 3: measures this machine and the house's own parts on it. Knows no terminal: it returns plain figures."""
