"""The commands that measure, study and train: `sirchat bench`, `compare`, `eval` and `train`.

The command line finds them by the names in `sirchat.cli.registry`.
"""
