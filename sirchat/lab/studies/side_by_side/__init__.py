"""Compares settings on one transcript: answers, tokens held, agreement with the full cache."""
