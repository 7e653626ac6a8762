"""What single families compute or cache in a way of their own, one idea a file; no family is known here by name."""
