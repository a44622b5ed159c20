"""The manifest of a package: its records, their JSON form, and their checks."""
