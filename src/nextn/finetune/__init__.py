"""A head inside transformers' and TRL's trainers."""
