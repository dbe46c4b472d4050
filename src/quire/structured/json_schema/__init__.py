"""Compiles a JSON schema to grammar rules that match exactly its instances, or refuses it and names the part."""
