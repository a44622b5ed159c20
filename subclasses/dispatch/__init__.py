"""How a class runs an op: resolution, and what runs an op without a rule: mapping, fallbacks, sharding, training."""
