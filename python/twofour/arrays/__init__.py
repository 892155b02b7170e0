"""Functions of numpy arrays, and of tensors: they require no torch."""
