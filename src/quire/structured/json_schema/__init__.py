"""From a JSON schema to rules of a grammar that match exactly its instances, or a refusal that names the part."""
