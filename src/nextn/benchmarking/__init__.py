"""What decoding costs here, with MTP and without, and whether it pays."""
