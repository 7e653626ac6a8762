"""The training losses, in chunks that bound the memory."""
