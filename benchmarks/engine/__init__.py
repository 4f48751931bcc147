"""Steps of our engine on a CPU, and of llama.cpp on the same file."""
