"""Measurements, one file each; `twinkv-edge bench` runs them."""
