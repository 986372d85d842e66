"""Benchmarks: speed and memory, measured side by side in one process and reported as ratios."""
