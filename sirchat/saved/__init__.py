"""Chats (sessions) on disk: one SQLite file for each chat, in one folder."""
