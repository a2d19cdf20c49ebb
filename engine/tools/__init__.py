"""Functions that a model may call: what callers declare, how models write calls, and how calls are read from text."""
