"""Blocks: who owns them, what they hold, which may be reused. Ids and hashes only; memory belongs to the worker."""
