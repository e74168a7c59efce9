"""Deterministic simulation of whole clusters: one seed decides everything."""
