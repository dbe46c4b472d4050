"""From logits to tokens: gathers each sequence's options into arrays and calls the backend's ops."""
