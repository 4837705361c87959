"""Runs that are compared: in fresh processes, or without weights at full geometry."""
