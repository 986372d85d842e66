"""Compares settings on one transcript by answers, held tokens and agreement with a full cache."""
