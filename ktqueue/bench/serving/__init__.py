"""The load of `ktqueue bench serve`: prompts, their arrivals, a client of any OpenAI-compatible server, figures."""
