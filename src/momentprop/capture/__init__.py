"""Captures an nn.Module as one functional graph with its noise in it."""
