"""What loading a package asks: text is written from records, weights are read, arguments are checked."""
