"""The built-in model, and the script that trains one like it."""
