"""Chats (sessions) on disk: one SQLite file for each chat, and the folder with all of them."""
