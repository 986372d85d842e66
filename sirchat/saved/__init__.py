"""Conversations on disk: one file each, and the folder they lie in."""
