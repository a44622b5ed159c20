"""Declarations: field markers, the frozen ``SubclassSpec``, and the checks of constructions."""
