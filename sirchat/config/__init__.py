"""Every setting, validated: profiles, their YAML files, and which value wins."""
