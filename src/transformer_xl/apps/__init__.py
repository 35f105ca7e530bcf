"""Programs on top of the library: the server, compression, benchmarks, `txl doctor`."""
