"""Floor 1: what runs inside the model's forward. Knows no scheduler, no request, no Redis."""
