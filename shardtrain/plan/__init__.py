"""Know before you pay: which layouts are legal, and what they cost."""
