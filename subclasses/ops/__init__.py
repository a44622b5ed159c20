"""What the schema of an op says of its arguments and results: which are written, which share memory; cotangents."""
