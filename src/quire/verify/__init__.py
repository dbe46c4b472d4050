"""Comparing a model with transformers' model of the same folder."""
