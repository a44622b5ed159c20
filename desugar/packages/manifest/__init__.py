"""The manifest of a package: its records, how they are written and read, and what is checked of them."""
