"""What saving a package asks: a call is captured, and described as a record of the manifest."""
