"""The settings, section by section. Each setting is described once, by `setting`."""
