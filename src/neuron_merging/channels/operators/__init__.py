"""operators: how each operator carries channels, by family, in one table."""
