"""What is true of one prepared model: types and files."""
