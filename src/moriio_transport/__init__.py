"""Transports behind one contract, the control channel, and the reactor that drives a core with them."""
