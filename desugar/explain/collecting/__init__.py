"""Makes the records of an explanation from what a compilation left: arguments, graphs, guards, costs, labels."""
