"""What is known: frozen records and options, how they print, and what every room needs to make them."""
