"""Where commands write: standard output, progress bars, errors."""
