"""What drives reach, timed with the reader of the runtime."""
