"""What the model remembers: the ledger, the cache of keys and values, the policies that choose.

This package knows tensors, never text, models or screens; `cache.py` alone knows transformers.
"""
