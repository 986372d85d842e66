"""A conversation with one model: reads and answers turns, yields events, switches settings."""
