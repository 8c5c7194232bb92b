"""Trust on one's own model and data: every tier beside MC dropout, and what to make of it."""
