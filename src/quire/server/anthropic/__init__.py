"""Anthropic's Messages API, on top of chats: `translate` and `conversation` (requests), `answer` (messages and streams)
and `routes`. Errors are in `quire.server.errors`.
"""
