"""Formulas of normal random variables, on tensors alone."""
