"""Studies, benchmarks, training and synthetic dialogues; a chat uses nothing in this package."""
