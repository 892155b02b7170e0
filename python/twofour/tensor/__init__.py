"""2:4 tensors, a subclass of torch's."""
