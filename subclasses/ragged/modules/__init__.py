"""Functions behind modules of ``torch.nn`` that look along the rows: convolutions, pools, recurrences, attention."""
