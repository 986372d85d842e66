"""The memory of a conversation: KV cache, archive of evicted tokens, token ledger, policies.

The ledger is a table with one row per token. A policy chooses which tokens stay in the cache. This
package works on tensors and imports no code for text, models or the screen; only `hub_cache.py`
imports transformers.
"""
