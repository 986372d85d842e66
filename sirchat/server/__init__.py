"""An HTTP server for chats, with the endpoints of OpenAI's and Anthropic's APIs."""
