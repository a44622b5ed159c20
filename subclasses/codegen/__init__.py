"""From text to live functions."""
