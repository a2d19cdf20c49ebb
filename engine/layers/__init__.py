"""Pieces that several model families share and no backend needs to know."""
