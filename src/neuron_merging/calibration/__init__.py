"""Statistics of the inputs of layers, and least-squares fits on them."""
