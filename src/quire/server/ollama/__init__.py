"""Ollama's API, on top of chats and completions: `protocol` (fields), `translate` (requests), `answer` (answers and
streams), `routes`, and `catalogue` for what tells of models. How errors look is in `quire.server.errors`.
"""
