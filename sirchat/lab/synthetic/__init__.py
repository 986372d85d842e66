"""Generates synthetic dialogue, for training and for studies.

In a dialogue the user tells facts, asks for them later, and talks of other things.
"""
