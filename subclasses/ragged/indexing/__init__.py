"""Indexing, splitting, gathering, joining, writing and views of both layouts."""
