"""A conversation with one model: turns in, events out, settings that switch in the middle."""
