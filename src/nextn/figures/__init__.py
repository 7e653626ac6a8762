"""What counts say: acceptance, intervals, the speed-up that they promise, and their pictures."""
