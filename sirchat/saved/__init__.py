"""Saved sessions: one SQLite file per conversation, and the folder with all of them."""
