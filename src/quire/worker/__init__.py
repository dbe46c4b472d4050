"""One device: the model, its KV cache, and the persistent batch; turns a step into sampled tokens."""
