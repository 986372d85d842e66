"""sirchat: endless chat with local language models, under a KV-cache budget that you choose."""

__version__ = "0.1.0"
