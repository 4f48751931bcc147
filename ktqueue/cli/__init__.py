"""Floor 4: the command line. A thin file for each verb or noun; nothing heavy is imported until a verb runs."""
