"""Alerts: rules over what was spent, what failed and what waits; each opens once, is sent, resolves."""
