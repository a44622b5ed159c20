"""The arguments of a captured graph, flattened into plain tensors, as fake tensors."""
