"""Reads GGUF files: maps each file into memory, and makes a model from it tensor by tensor."""
