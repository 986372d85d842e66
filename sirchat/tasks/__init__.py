"""Evaluations: what a model under a policy still remembers. One file per task."""
