"""Loads a causal language model, finds its rotations, and hooks its attention."""
