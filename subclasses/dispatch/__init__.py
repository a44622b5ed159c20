"""Resolution of ops: rules, and for an op without a rule the map over inner tensors or another fallback."""
