"""Scores of predictions: metrics and how certain they are."""
