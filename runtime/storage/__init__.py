"""Records from drives through host memory to the device: what is where, who reads what, and who leaves."""
