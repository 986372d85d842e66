"""What the model remembers: KV cache, archive of evicted tokens, token ledger, eviction policies.

This package works on tensors. It imports no code for text, models or the screen; only
`hub_cache.py` imports transformers.
"""
