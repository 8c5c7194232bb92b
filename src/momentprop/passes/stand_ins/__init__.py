"""Approximates operators that have no rule, where the user asks for that."""
