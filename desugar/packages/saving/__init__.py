"""Saves packages: captures a call, and describes it as a record of the manifest."""
