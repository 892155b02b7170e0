"""What stands in for other libraries' kernels and formats: torch's 2:4 operators, and block-sparse tensors."""
