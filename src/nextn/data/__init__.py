"""Text files and data sets as token ids. These modules know neither models nor losses, and import torch lazily."""
