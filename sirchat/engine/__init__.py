"""Reads and generates token ids (never text), with a KV cache that stays within a budget."""
