"""Measurements, each with its record in results/; none of them is a test."""
