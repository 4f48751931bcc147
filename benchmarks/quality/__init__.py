"""How near results are to the float model."""
