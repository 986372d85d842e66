"""The laboratory's commands, which the command line finds in `sirchat.cli.registry`."""
