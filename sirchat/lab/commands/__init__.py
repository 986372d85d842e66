"""The commands of `sirchat.lab`; `sirchat.cli.registry` lists them for the command line."""
