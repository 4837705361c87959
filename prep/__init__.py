"""From a checkpoint to bytes at rest: kprep."""
