"""Hooks for classes of other libraries: interned metadata, guards, keys of compiled programs, loading."""
