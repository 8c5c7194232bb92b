"""Runs a captured graph many times with drawn noise."""
