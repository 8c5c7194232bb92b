"""Predictive distributions made of moments or samples, and decisions based on them."""
