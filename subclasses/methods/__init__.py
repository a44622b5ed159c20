"""Generated methods of declared classes: their text, their installation, and the functions they call."""
