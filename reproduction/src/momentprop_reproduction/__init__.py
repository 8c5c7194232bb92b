"""Runs the paper's experiments again with momentprop, a small demo, and the benchmark of its costs."""
