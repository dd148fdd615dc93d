"""What the site is made of and with; no part of the package."""
