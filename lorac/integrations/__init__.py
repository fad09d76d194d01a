"""lorac inside other people's engines: each module serves one of them."""
