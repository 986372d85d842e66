"""Loads causal language models, detects their rotary embeddings, and observes their attention."""
