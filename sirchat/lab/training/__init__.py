"""Trains the bundled models, anchors (AnSAN) for any causal language model, and token scorers."""
