"""Files of OpenAI batch lines: read, run as jobs, answers appended. It knows no terminal."""
