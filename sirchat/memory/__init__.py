"""The model's memory: the ledger of tokens, the KV cache, its archive, and the eviction policies.

This package works on tensors. It imports no text, model or screen code; only `cache.py` imports
transformers.
"""
