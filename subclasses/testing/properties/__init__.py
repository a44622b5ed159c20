"""What the conformance kit checks: one property, called a promise in reports, per function."""
