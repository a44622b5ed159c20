"""Functions of ``torch.nn`` modules that mix the entries of a row: convolutions, pools, recurrences, attention."""
