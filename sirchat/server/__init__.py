"""An HTTP server for chats, with the endpoints of OpenAI's and Ollama's APIs."""
