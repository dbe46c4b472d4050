"""Compiles structured output options to grammars for llguidance; `sampling` makes token bitmasks of them."""
