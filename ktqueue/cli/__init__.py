"""Floor 5: the command line. A file or folder for each command; nothing heavy is imported until a command runs."""
