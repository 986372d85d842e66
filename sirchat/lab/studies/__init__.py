"""Studies: what a model still remembers under an eviction policy. One module for each study."""
