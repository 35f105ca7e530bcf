"""Programs on top of the library: the server, compression, benchmarks, estimates, `txl doctor`."""
