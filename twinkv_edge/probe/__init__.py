"""Probes of the premise behind eviction policies."""
