"""Floor 4: measures this machine and the parts of ktqueue on it. It returns plain figures and writes to no terminal."""
