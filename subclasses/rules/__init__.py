"""Rules: registered and found, checked when they are registered and when they return; their errors."""
