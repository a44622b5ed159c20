"""Rules of both layouts, each written once on the interface of ``base.py``."""
