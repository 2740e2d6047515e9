"""What becomes of a run in which something fails."""
