"""Makes the records of an explanation from a compilation: arguments, graphs, guards, costs, labels."""
