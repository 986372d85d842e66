"""Studies, benchmarks, training and synthetic dialogues; a chat needs none of it."""
