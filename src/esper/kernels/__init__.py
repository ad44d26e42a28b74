"""kernels: hand-written fast paths; every one has a plain twin and a parity test, so none has to be read."""
