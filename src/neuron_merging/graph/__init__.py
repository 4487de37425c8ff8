"""graph: a network as data; capturing, running and copying it."""
