"""Text to ids and back: chat template, transcripts, detokenizer, sentences, anchor placement."""
