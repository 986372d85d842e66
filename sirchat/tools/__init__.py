"""Tools by MCP (Model Context Protocol): their servers, and what these return."""
