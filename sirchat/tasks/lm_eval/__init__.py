"""The tasks of lm-evaluation-harness under policies and budgets."""
