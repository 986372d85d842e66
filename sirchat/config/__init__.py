"""Settings: the profile, its YAML files, and the precedence of flags, environment and files."""
