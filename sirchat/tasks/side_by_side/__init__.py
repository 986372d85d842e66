"""Settings side by side on one transcript: answers, what is held, agreement with `full`."""
