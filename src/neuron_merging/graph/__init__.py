"""A network as data: capture it with torch.export, run it, copy it."""
