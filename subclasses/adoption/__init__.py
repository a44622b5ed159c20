"""Hooks for classes that somebody else wrote: interned metadata, guards, keys of compiled programs, loading."""
