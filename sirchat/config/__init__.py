"""The settings of sirchat: their types and limits, and the flags, variables and files for them."""
