"""How long a step or a call takes."""
