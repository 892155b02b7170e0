"""What stands in for torch's own 2:4 kernels, in programs that cannot be changed."""
