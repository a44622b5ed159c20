"""Intermediate records that every stage reads: values, outputs, graphs; and helpers for graphs and storages."""
