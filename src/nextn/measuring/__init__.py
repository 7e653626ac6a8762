"""The acceptance that a head should have, and what changes it."""
