"""Runs sirchat's policies as presses (compression methods) of NVIDIA's kvpress."""
