"""Recall: finds the evicted tokens that a new turn needs, and restores them for it."""
