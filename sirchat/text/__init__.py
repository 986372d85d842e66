"""Turns text into token ids and back: chat template, anchors, detokenizer; reads transcripts."""
