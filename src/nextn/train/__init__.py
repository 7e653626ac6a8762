"""Training of trunks with heads and of heads on frozen trunks: tasks, the loop, checkpoints and metrics."""
