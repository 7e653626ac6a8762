"""Text of files and data sets, as token ids."""
