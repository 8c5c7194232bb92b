"""Runs a graph of rules: the forward sweep of moments, and the backward sweep for their covariance."""
