"""Reads and generates token ids, with a KV cache that stays within a budget; knows no text."""
