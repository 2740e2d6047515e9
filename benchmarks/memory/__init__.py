"""How many bytes a step takes."""
