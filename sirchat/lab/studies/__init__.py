"""Studies that measure what a model still remembers under an eviction policy, one per module."""
