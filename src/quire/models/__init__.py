"""Model families, one file each, written against the layers; and the registry that names them."""
