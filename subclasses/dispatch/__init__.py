"""How a class runs an op: rules, schemas, aliasing, fallbacks."""
