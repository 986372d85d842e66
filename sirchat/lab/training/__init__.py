"""Trains anchors (AnSAN) and sentence encoders for any causal language model."""
