"""Training of the bundled model: the world it knows, the dialogues it reads, the trainer."""
