"""Passes over plain graphs: the partitioner, mutations, verification."""
