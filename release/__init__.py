"""How a release is made."""
