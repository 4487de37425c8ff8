"""Channel analysis: which slices of which tensors are coupled and can be removed together."""
