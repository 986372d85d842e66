"""Tools by MCP: their servers, and what these return."""
