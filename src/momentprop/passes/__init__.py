"""Rewrites a captured graph: exact simplifications, recognised patterns, stand-ins for missing rules."""
