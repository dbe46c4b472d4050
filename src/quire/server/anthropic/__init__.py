"""Anthropic's Messages API, on top of chats: `protocol` (fields), `translate` (requests), `answer` (messages and
streams) and `routes`. How errors look is in `quire.server.errors`.
"""
