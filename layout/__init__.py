"""Bytes at rest: records, number formats, checkpoints, drives, reading and writing."""
