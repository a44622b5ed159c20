"""From a class statement to a frozen declaration."""
