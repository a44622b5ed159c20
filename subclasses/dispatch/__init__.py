"""How a class runs an op: resolution, rules, schemas, aliasing, fallbacks."""
