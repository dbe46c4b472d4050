"""How model families write reasoning and tool calls: one description each, for the constraint and for the parser."""
