"""`sirchat eval facts-in-dialogue`: facts told amid real dialogue, and asked for later."""
