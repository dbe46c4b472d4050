"""Text to token ids and back, from a model folder: for the front, and for grammars in the data plane."""
