"""Decides which sequences compute how many tokens in each step: plain Python over ids and counts, without torch."""
