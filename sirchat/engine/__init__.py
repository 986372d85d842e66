"""Reads and generates ids over a cache that stays within its budget. Ids only, never text."""
