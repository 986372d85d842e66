"""Training of the bundled models, and anchor (AnSAN) training of any causal language model."""
