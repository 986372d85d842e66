"""Serves conversations over HTTP, by the interface of OpenAI's chat completions."""
