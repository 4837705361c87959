"""Checkpoint to bytes at rest: what kprep plan and kprep extract do."""
