"""Training with masks held: batches, schedules, one step, the loop."""
