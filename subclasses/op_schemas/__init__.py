"""Facts and checks from the schema of an op: arguments that it writes to, results that share memory, and tangents."""
