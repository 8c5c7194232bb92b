"""Runs the paper's experiments again with momentprop, and measures what uncertainty costs."""
