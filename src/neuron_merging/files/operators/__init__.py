"""operators: how torch computes each operator of a file, by family, in one table."""
