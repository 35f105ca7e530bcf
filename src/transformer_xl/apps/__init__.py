"""Programs on top of the library: the server, compression, `txl doctor`."""
