"""Runs the tasks of lm-evaluation-harness under policies and budgets."""
