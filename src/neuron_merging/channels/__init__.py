"""channels: which slices of which tensors stand and fall together."""
