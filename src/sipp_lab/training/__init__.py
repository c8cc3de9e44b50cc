"""Training with fixed masks: batches, schedules, single steps, and the loop."""
