"""Mesh, rules and placement: names and tables; no model, no optimizer."""
