"""The registered models seen side by side: their sizes, shapes and memory, and what has been measured of them."""
