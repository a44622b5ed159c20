"""``torch.cond`` and ``while_loop`` over tensors of declared classes."""
