"""Scores of sirchat as presses of NVIDIA's kvpress."""
