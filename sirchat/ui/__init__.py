"""The user interface in a terminal: prompt, slash commands, memory panel, replay of transcripts."""
