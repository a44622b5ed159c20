"""The store of programs: what a second process that compiles the same function reads instead of tracing it again."""
