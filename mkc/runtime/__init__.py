"""Runs compiled kernels: weights to operands, states in and out."""
