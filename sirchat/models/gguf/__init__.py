"""GGUF files: read once, mapped into memory, and made into a model tensor by tensor."""
