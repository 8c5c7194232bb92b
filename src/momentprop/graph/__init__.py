"""Edits fx graphs and reads what their nodes say."""
