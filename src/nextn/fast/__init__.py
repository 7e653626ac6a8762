"""The fast path: a model's passes recorded as programs of a small native runtime, behind the plain signatures."""
