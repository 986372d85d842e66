"""Benchmarks of sirchat's speed and memory.

Speed is measured side by side with another way to do the same work, and reported as a ratio.
"""
