"""Floor 1: modules and functions that run inside the model's forward. Knows no scheduler, no request and no Redis."""
