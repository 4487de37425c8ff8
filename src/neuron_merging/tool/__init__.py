"""tool: the command line."""
