"""Studies: what a model still remembers under an eviction policy. One file for each task."""
