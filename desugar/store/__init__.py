"""The store of programs: a second process that compiles the same function loads it instead of tracing it again."""
