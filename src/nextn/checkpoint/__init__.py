"""The files of a model: which tensors of a head they hold, how these are stored, and whose head it is."""
