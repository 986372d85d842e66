"""What people see: the display filter, the panel, the prompt, replayed transcripts."""
