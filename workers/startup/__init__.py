"""From settings to an engine: the model, its memory, the device, and whether it will fit."""
