"""The files of a model: what they hold of a head, how it is stored, whose it is."""
