"""KV caches and recurrent state that can be rolled back exactly."""
