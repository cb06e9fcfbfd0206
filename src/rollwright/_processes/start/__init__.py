"""How processes start: the fork server, what it imports, and the other methods."""
