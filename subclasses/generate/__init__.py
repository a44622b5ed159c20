"""The generated methods of a declared class."""
