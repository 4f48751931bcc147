"""Files of OpenAI batch lines: read, run through the queue in a window, answers appended. Knows no terminal."""
