"""Proof that a model computes what transformers computes: the oracle, our side, and where they part."""
