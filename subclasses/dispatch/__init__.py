"""How a class runs an op: resolution, and for ops without a rule mapping, fallbacks, sharding and training."""
