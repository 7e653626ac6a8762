"""The native backend: a model's passes, recorded and lowered to programs of a small C++ runtime for CPUs."""
