"""Passes over plain graphs: the partitioner, mutations, pruning, verification."""
