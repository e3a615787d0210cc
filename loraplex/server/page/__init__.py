"""The web page at `/`: its files, and what it shows that no other route has."""
