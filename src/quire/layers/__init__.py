"""What models are made of: linears that own their sharding, norms, rotary tables, attention."""
