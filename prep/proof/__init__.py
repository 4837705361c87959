"""Bytes at rest against their hashes: verified, repaired, adopted."""
