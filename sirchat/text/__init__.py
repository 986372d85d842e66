"""Text to token ids and back: chat template, transcripts, detokenizer, sentences, anchors."""
